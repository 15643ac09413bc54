//! The numbers and layouts of the transmission phase.

use swaptide_sys::Errno;

pub(super) const READ: u16 = 0;
pub(super) const WRITE: u16 = 1;
pub(super) const DISC: u16 = 2;
pub(super) const FLUSH: u16 = 3;
pub(super) const TRIM: u16 = 4;

/// Before the reply, to the disk.
pub(super) const FLAG_FUA: u16 = 1 << 0;

/// Bytes before a request's data.
pub(super) const REQUEST_HEADER_BYTES: usize = 28;
/// Bytes of a simple reply before its data.
const SIMPLE_HEADER_BYTES: usize = 16;
/// Bytes of a chunk of a structured reply before its payload.
const CHUNK_HEADER_BYTES: usize = 20;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

const CHUNK_LAST: u16 = 1 << 0;
pub(super) const CHUNK_NONE: u16 = 0;
pub(super) const CHUNK_DATA: u16 = 1;
pub(super) const CHUNK_HOLE: u16 = 2;
/// Set in the types of all chunks that tell an error.
pub(super) const CHUNK_ERROR: u16 = 1 << 15;

/// The longest payload of a chunk that tells an error: its numbers and a message.
pub(super) const MAX_ERROR_BYTES: u32 = 8 << 10;

/// Returns the header of a request.
pub(super) fn request(
    command: u16,
    flags: u16,
    cookie: u64,
    offset: u64,
    len: u32,
) -> [u8; REQUEST_HEADER_BYTES] {
    let mut out = [0; REQUEST_HEADER_BYTES];
    out[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&command.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..24].copy_from_slice(&offset.to_be_bytes());
    out[24..].copy_from_slice(&len.to_be_bytes());
    out
}

/// The header of a reply.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Head {
    /// The data of a read follows where there is no error.
    Simple { error: u32, cookie: u64 },
    /// `len` bytes follow.
    Chunk { kind: u16, last: bool, cookie: u64, len: u32 },
}

/// The head that `bytes` begin with and its length; `Ok(None)` if there is more of it to come.
pub(super) fn head(bytes: &[u8]) -> Result<Option<(Head, usize)>, Garbled> {
    let Some(magic) = u32_at(bytes, 0) else { return Ok(None) };
    let head = match magic {
        SIMPLE_MAGIC => u32_at(bytes, 4)
            .zip(u64_at(bytes, 8))
            .map(|(error, cookie)| (Head::Simple { error, cookie }, SIMPLE_HEADER_BYTES)),
        CHUNK_MAGIC => (|| {
            let (flags, kind) = (u16_at(bytes, 4)?, u16_at(bytes, 6)?);
            let (cookie, len) = (u64_at(bytes, 8)?, u32_at(bytes, 16)?);
            Some((
                Head::Chunk { kind, last: flags & CHUNK_LAST != 0, cookie, len },
                CHUNK_HEADER_BYTES,
            ))
        })(),
        _ => return Err(Garbled),
    };
    Ok(head)
}

/// The data received violates the protocol.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Garbled;

/// The server will take no more requests.
pub(super) const SHUTDOWN: u32 = 108;

/// An error number of the protocol; an unknown one means that something failed.
pub(super) fn errno(number: u32) -> Errno {
    match number {
        1 => Errno::PERM,
        // The server is short of memory, and not this process.
        12 => Errno::BUSY,
        22 => Errno::INVAL,
        28 => Errno::NOSPC,
        75 => Errno::OVERFLOW,
        95 => Errno::OPNOTSUPP,
        _ => Errno::IO,
    }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}
