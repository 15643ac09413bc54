//! The two C libraries behind the codec: lz4 and zstd, each used through the few functions that
//! allocate nothing and keep no state of their own. The only unsafe code of the codec.
//!
//! Owns the memory the libraries work in: lz4's hash table, zstd's contexts. All of it is allocated
//! when an owner is made; calls after that allocate nothing. That memory is not touched before it
//! is needed, so a codec that is never used costs address space only.
//!
//! Invariants:
//! 1. A library writes only to the memory of its owner and to the output it is given, whatever the
//!    input holds.
//! 2. A zstd frame made here begins with a byte of 0 (no magic number, and a frame header that
//!    declares nothing); an lz4 block never does. Its second byte, the window, is far from 255.

use core::alloc::Layout;
use core::ffi::{c_char, c_int, c_void};
use core::ptr::NonNull;

use zstd_sys::ZSTD_cParameter as Parameter;

use super::Level;
use crate::PAGE_SIZE;

// Not among what `lz4_sys` declares, but part of the library it builds.
unsafe extern "C" {
    fn LZ4_sizeofState() -> c_int;
    fn LZ4_compress_fast_extState_fastReset(
        state: *mut c_void,
        source: *const c_char,
        target: *mut c_char,
        source_len: c_int,
        target_len: c_int,
        acceleration: c_int,
    ) -> c_int;
}

/// Memory for a library, aligned to 64 bytes. It stays where it is when its owner moves.
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Memory {}
// SAFETY: a shared reference to it gives no access to what it holds.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(len: usize, zeroed: bool) -> Memory {
        let layout =
            Layout::from_size_align(len.max(1), 64).expect("a codec's memory is some hundred KiB");
        // SAFETY: the layout's size is not zero.
        let start = unsafe {
            if zeroed { std::alloc::alloc_zeroed(layout) } else { std::alloc::alloc(layout) }
        };
        let Some(start) = NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        Memory { start, layout }
    }

    fn ptr<T>(&self) -> *mut T {
        self.start.as_ptr().cast()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no longer used.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Compresses with lz4.
pub(super) struct Lz4 {
    state: Memory,
}

impl Lz4 {
    pub(super) fn new() -> Lz4 {
        // SAFETY: only answers a number.
        let len = unsafe { LZ4_sizeofState() } as usize;
        // All zeros is a fresh state.
        Lz4 { state: Memory::new(len, true) }
    }

    /// Bytes that any input of `len` bytes fits in when compressed.
    pub(super) fn bound(len: usize) -> usize {
        len + len / 255 + 16
    }

    /// Compresses `input`, which is not empty, to the start of `out`; `None` when it does not fit.
    pub(super) fn compress(&mut self, input: &[u8], out: &mut [u8]) -> Option<usize> {
        let (len, room) = (c_int::try_from(input.len()).ok()?, c_int::try_from(out.len()).ok()?);
        // SAFETY: the state is as large as the library asks, aligned, and was zeroed or left by
        // this function before, which is what this function of the library asks for; input and
        // output are slices, given with their lengths.
        let len = unsafe {
            LZ4_compress_fast_extState_fastReset(
                self.state.ptr(),
                input.as_ptr().cast(),
                out.as_mut_ptr().cast(),
                len,
                room,
                1,
            )
        };
        usize::try_from(len).ok().filter(|&len| len > 0)
    }
}

/// Decompresses an lz4 block to the start of `out`; gives its length, or nothing if it is no block
/// or does not fit.
pub(super) fn lz4_decompress(block: &[u8], out: &mut [u8]) -> Option<usize> {
    let (len, room) = (c_int::try_from(block.len()).ok()?, c_int::try_from(out.len()).ok()?);
    // SAFETY: two slices, given with their lengths; the library's function for untrusted
    // blocks.
    let len = unsafe {
        lz4_sys::LZ4_decompress_safe(block.as_ptr().cast(), out.as_mut_ptr().cast(), len, room)
    };
    usize::try_from(len).ok()
}

/// Compresses pages with zstd.
pub(super) struct ZstdCompressor {
    context: NonNull<zstd_sys::ZSTD_CCtx>,
    /// The memory that `context` points into.
    _memory: Memory,
}

// SAFETY: the context lies in the memory next to it and refers to nothing else.
unsafe impl Send for ZstdCompressor {}

impl ZstdCompressor {
    pub(super) fn new(level: Level) -> ZstdCompressor {
        let level = c_int::from(level.get());
        // SAFETY: both only compute numbers.
        let (parameters, len) = unsafe {
            let parameters = zstd_sys::ZSTD_getCParams(level, PAGE_SIZE as u64, 0);
            (parameters, zstd_sys::ZSTD_estimateCCtxSize_usingCParams(parameters))
        };
        let memory = Memory::new(len, false);
        // SAFETY: the memory is as long as said and stays as long as the context.
        let context = unsafe { zstd_sys::ZSTD_initStaticCCtx(memory.ptr(), len) };
        let context = NonNull::new(context).expect("zstd takes as much memory as it asked for");
        let plain = [
            (Parameter::ZSTD_c_compressionLevel, level),
            // No magic number: what it is, its place says.
            (
                Parameter::ZSTD_c_experimentalParam2,
                zstd_sys::ZSTD_format_e::ZSTD_f_zstd1_magicless as i32,
            ),
            (Parameter::ZSTD_c_contentSizeFlag, 0),
            (Parameter::ZSTD_c_checksumFlag, 0),
            (Parameter::ZSTD_c_dictIDFlag, 0),
        ];
        for (parameter, value) in plain {
            // SAFETY: the context was just made.
            let answer =
                unsafe { zstd_sys::ZSTD_CCtx_setParameter(context.as_ptr(), parameter, value) };
            assert!(size(answer).is_some(), "zstd does not know a parameter");
        }
        // SAFETY: the context was just made, and no other thread has it.
        let answer = unsafe { zstd_sys::ZSTD_CCtx_setCParams(context.as_ptr(), parameters) };
        assert!(size(answer).is_some(), "zstd does not take its own parameters");
        ZstdCompressor { context, _memory: memory }
    }

    /// Compresses a page, or a part of one, to the start of `out`; `None` when it does not fit.
    pub(super) fn compress(&mut self, page: &[u8], out: &mut [u8]) -> Option<usize> {
        // SAFETY: the context is exclusively ours; input and output are given with their lengths.
        size(unsafe {
            zstd_sys::ZSTD_compress2(
                self.context.as_ptr(),
                out.as_mut_ptr().cast(),
                out.len(),
                page.as_ptr().cast(),
                page.len(),
            )
        })
    }
}

/// Decompresses zstd frames.
pub(super) struct ZstdDecompressor {
    context: NonNull<zstd_sys::ZSTD_DCtx>,
    /// What `context` points into.
    _memory: Memory,
}

// SAFETY: the context lies in the memory next to it and refers to nothing else.
unsafe impl Send for ZstdDecompressor {}

impl ZstdDecompressor {
    pub(super) fn new() -> ZstdDecompressor {
        // SAFETY: only answers a number.
        let len = unsafe { zstd_sys::ZSTD_estimateDCtxSize() };
        let memory = Memory::new(len, false);
        // SAFETY: the memory is as long as said and stays as long as the context.
        let context = unsafe { zstd_sys::ZSTD_initStaticDCtx(memory.ptr(), len) };
        let context = NonNull::new(context).expect("zstd takes as much memory as it asked for");
        // SAFETY: the context was just made.
        let answer = unsafe {
            zstd_sys::ZSTD_DCtx_setFormat(
                context.as_ptr(),
                zstd_sys::ZSTD_format_e::ZSTD_f_zstd1_magicless,
            )
        };
        assert!(size(answer).is_some(), "zstd does not know a format");
        ZstdDecompressor { context, _memory: memory }
    }

    /// Decompresses a frame to the start of `out`; gives its length, or nothing if it is no frame
    /// or does not fit.
    pub(super) fn decompress(&mut self, frame: &[u8], out: &mut [u8]) -> Option<usize> {
        // SAFETY: the context is exclusively ours; two slices, given with their lengths. The
        // library checks the frame.
        size(unsafe {
            zstd_sys::ZSTD_decompressDCtx(
                self.context.as_ptr(),
                out.as_mut_ptr().cast(),
                out.len(),
                frame.as_ptr().cast(),
                frame.len(),
            )
        })
    }
}

/// Returns the result of a function of zstd, unless it is an error.
fn size(answer: usize) -> Option<usize> {
    // SAFETY: only looks at the number.
    (unsafe { zstd_sys::ZSTD_isError(answer) } == 0).then_some(answer)
}
