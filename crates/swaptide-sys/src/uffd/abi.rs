//! The kernel's structures, request numbers and bits.

use linux_raw_sys::general as k;

use crate::page::VirtRange;

#[repr(C)]
#[derive(Copy, Clone)]
pub(super) struct AbiApi {
    pub(super) api: u64,
    pub(super) features: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
#[derive(Copy, Clone)]
pub(super) struct AbiRange {
    pub(super) start: u64,
    pub(super) len: u64,
}

#[repr(C)]
#[derive(Copy, Clone)]
pub(super) struct AbiRegister {
    pub(super) range: AbiRange,
    pub(super) mode: u64,
    pub(super) ioctls: u64,
}

/// COPY and MOVE share one shape.
#[repr(C)]
#[derive(Copy, Clone)]
pub(super) struct AbiTransfer {
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
    pub(super) done: i64,
}

/// ZEROPAGE, CONTINUE and POISON share one shape.
#[repr(C)]
#[derive(Copy, Clone)]
pub(super) struct AbiFill {
    pub(super) range: AbiRange,
    pub(super) mode: u64,
    pub(super) done: i64,
}

#[repr(C)]
#[derive(Copy, Clone)]
pub(super) struct AbiWriteProtect {
    pub(super) range: AbiRange,
    pub(super) mode: u64,
}

const _: () = {
    assert!(size_of::<AbiApi>() == size_of::<k::uffdio_api>());
    assert!(size_of::<AbiRange>() == size_of::<k::uffdio_range>());
    assert!(size_of::<AbiRegister>() == size_of::<k::uffdio_register>());
    assert!(size_of::<AbiTransfer>() == size_of::<k::uffdio_copy>());
    assert!(size_of::<AbiTransfer>() == size_of::<k::uffdio_move>());
    assert!(size_of::<AbiFill>() == size_of::<k::uffdio_zeropage>());
    assert!(size_of::<AbiFill>() == size_of::<k::uffdio_continue>());
    assert!(size_of::<AbiFill>() == size_of::<k::uffdio_poison>());
    assert!(size_of::<AbiWriteProtect>() == size_of::<k::uffdio_writeprotect>());
    assert!(size_of::<super::Message>() == size_of::<k::uffd_msg>());
};

const IOC_WRITE: u32 = 1;
const IOC_READ: u32 = 2;

const fn ioc(dir: u32, nr: u32, size: usize) -> u32 {
    (dir << 30) | ((size as u32) << 16) | (k::UFFDIO << 8) | nr
}

pub(super) const UFFDIO_API: u32 = ioc(IOC_READ | IOC_WRITE, k::_UFFDIO_API, size_of::<AbiApi>());
/// The request that registers a range.
pub const UFFDIO_REGISTER: u32 =
    ioc(IOC_READ | IOC_WRITE, k::_UFFDIO_REGISTER, size_of::<AbiRegister>());
pub(super) const UFFDIO_UNREGISTER: u32 =
    ioc(IOC_READ, k::_UFFDIO_UNREGISTER, size_of::<AbiRange>());
pub(super) const UFFDIO_WAKE: u32 = ioc(IOC_READ, k::_UFFDIO_WAKE, size_of::<AbiRange>());
pub(super) const UFFDIO_COPY: u32 =
    ioc(IOC_READ | IOC_WRITE, k::_UFFDIO_COPY, size_of::<AbiTransfer>());
pub(super) const UFFDIO_ZEROPAGE: u32 =
    ioc(IOC_READ | IOC_WRITE, k::_UFFDIO_ZEROPAGE, size_of::<AbiFill>());
/// The request that moves pages.
pub const UFFDIO_MOVE: u32 = ioc(IOC_READ | IOC_WRITE, k::_UFFDIO_MOVE, size_of::<AbiTransfer>());
pub(super) const UFFDIO_WRITEPROTECT: u32 =
    ioc(IOC_READ | IOC_WRITE, k::_UFFDIO_WRITEPROTECT, size_of::<AbiWriteProtect>());
pub(super) const UFFDIO_CONTINUE: u32 =
    ioc(IOC_READ | IOC_WRITE, k::_UFFDIO_CONTINUE, size_of::<AbiFill>());
pub(super) const UFFDIO_POISON: u32 =
    ioc(IOC_READ | IOC_WRITE, k::_UFFDIO_POISON, size_of::<AbiFill>());
/// On `/dev/userfaultfd`: make a descriptor.
pub(super) const USERFAULTFD_IOC_NEW: u32 = ioc(0, 0, 0);

const _: () = {
    use linux_raw_sys::ioctl as i;
    assert!(UFFDIO_API == i::UFFDIO_API && UFFDIO_REGISTER == i::UFFDIO_REGISTER);
    assert!(UFFDIO_UNREGISTER == i::UFFDIO_UNREGISTER && UFFDIO_WAKE == i::UFFDIO_WAKE);
    assert!(UFFDIO_COPY == i::UFFDIO_COPY && UFFDIO_ZEROPAGE == i::UFFDIO_ZEROPAGE);
};

pub(super) const UFFD_API: u64 = 0xaa;
/// Mode bits of the answering calls: do not wake waiters; write-protect (COPY); tolerate holes
/// (MOVE).
pub(super) const DONT_WAKE: u64 = k::UFFDIO_COPY_MODE_DONTWAKE as u64;
pub(super) const COPY_WP: u64 = k::UFFDIO_COPY_MODE_WP as u64;
pub(super) const MOVE_ALLOW_SRC_HOLES: u64 = 2;
pub(super) const WRITEPROTECT_ON: u64 = 1;

pub(super) const EVENT_PAGEFAULT: u8 = k::UFFD_EVENT_PAGEFAULT as u8;
pub(super) const EVENT_FORK: u8 = k::UFFD_EVENT_FORK as u8;
pub(super) const EVENT_REMAP: u8 = k::UFFD_EVENT_REMAP as u8;
pub(super) const EVENT_REMOVE: u8 = k::UFFD_EVENT_REMOVE as u8;
pub(super) const EVENT_UNMAP: u8 = k::UFFD_EVENT_UNMAP as u8;
pub(super) const FAULT_WRITE: u64 = k::UFFD_PAGEFAULT_FLAG_WRITE as u64;
pub(super) const FAULT_WP: u64 = k::UFFD_PAGEFAULT_FLAG_WP as u64;

pub(super) fn abi_range(range: VirtRange) -> AbiRange {
    AbiRange { start: range.start.0 as u64, len: range.len() as u64 }
}
