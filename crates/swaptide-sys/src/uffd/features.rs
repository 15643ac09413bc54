//! What a userfaultfd can do, and why there may be none.

use core::fmt;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use crate::errno::ErrnoName;

bitflags::bitflags! {
    /// The features of a userfaultfd: a set of the kernel's feature bits.
    #[derive(Copy, Clone, PartialEq, Eq, Hash, Default)]
    pub struct Features: u64 {
        /// Write-protect faults are told apart (5.7).
        const PAGEFAULT_FLAG_WP = k::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        /// A fork sends the child's descriptor; needs `CAP_SYS_PTRACE` (4.11).
        const EVENT_FORK = k::UFFD_FEATURE_EVENT_FORK as u64;
        /// `mremap` is reported (4.11).
        const EVENT_REMAP = k::UFFD_FEATURE_EVENT_REMAP as u64;
        /// `madvise(DONTNEED)` and its like are reported (4.11).
        const EVENT_REMOVE = k::UFFD_FEATURE_EVENT_REMOVE as u64;
        /// Missing faults on hugetlbfs (4.11).
        const MISSING_HUGETLBFS = k::UFFD_FEATURE_MISSING_HUGETLBFS as u64;
        /// Missing faults on shared memory (4.11).
        const MISSING_SHMEM = k::UFFD_FEATURE_MISSING_SHMEM as u64;
        /// `munmap` is reported (4.11).
        const EVENT_UNMAP = k::UFFD_FEATURE_EVENT_UNMAP as u64;
        /// Faults raise `SIGBUS` in the faulting thread instead of a message (4.14).
        const SIGBUS = k::UFFD_FEATURE_SIGBUS as u64;
        /// Messages carry the thread id (4.14).
        const THREAD_ID = k::UFFD_FEATURE_THREAD_ID as u64;
        /// Minor faults on hugetlbfs (5.13).
        const MINOR_HUGETLBFS = k::UFFD_FEATURE_MINOR_HUGETLBFS as u64;
        /// Minor faults on shared memory (5.14).
        const MINOR_SHMEM = k::UFFD_FEATURE_MINOR_SHMEM as u64;
        /// Messages carry the exact address, not its page (5.18).
        const EXACT_ADDRESS = k::UFFD_FEATURE_EXACT_ADDRESS as u64;
        /// Write protection of hugetlbfs and shared memory (5.19).
        const WP_HUGETLBFS_SHMEM = k::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
        /// Write protection of pages that do not exist (6.4).
        const WP_UNPOPULATED = k::UFFD_FEATURE_WP_UNPOPULATED as u64;
        /// Pages can be poisoned (6.6).
        const POISON = k::UFFD_FEATURE_POISON as u64;
        /// Write protection that resolves itself and only marks (6.7).
        const WP_ASYNC = k::UFFD_FEATURE_WP_ASYNC as u64;
        /// Pages can be moved (6.8).
        const MOVE = k::UFFD_FEATURE_MOVE as u64;
    }
}

/// `EVENT_FORK|MOVE`; `bit40` for one without a name; `none`.
impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut named = self.iter_names();
        for (name, _) in named.by_ref() {
            write!(f, "{separator}{name}")?;
            separator = "|";
        }
        let unnamed = named.remaining().bits();
        for bit in (0..64).filter(|bit| unnamed >> bit & 1 == 1) {
            write!(f, "{separator}bit{bit}")?;
            separator = "|";
        }
        if separator.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}

/// Why no userfaultfd could be had.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Neither the system call nor the device gave a descriptor.
    #[error("userfaultfd: {}", DeniedText(*.syscall, *.device))]
    Denied {
        /// The error of the system call.
        syscall: Errno,
        /// The error of `/dev/userfaultfd`; `None` if it was not tried.
        device: Option<Errno>,
    },
    /// This kernel has no such features.
    #[error("userfaultfd: this kernel lacks {missing:?}; swaptide needs Linux 6.8 or newer")]
    Unsupported {
        /// The features it lacks.
        missing: Features,
    },
    /// There is a descriptor, but the kernel refused the features with this error (`EPERM`: fork
    /// events need `CAP_SYS_PTRACE`).
    #[error("userfaultfd: {asked:?} refused{}", RefusedText(*.errno))]
    Refused {
        /// The features requested.
        asked: Features,
        /// The error number that it gave.
        errno: Errno,
    },
}

struct DeniedText(Errno, Option<Errno>);

impl fmt::Display for DeniedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &DeniedText(syscall, device) = self;
        if syscall == Errno::NOSYS {
            return f.write_str(
                "this kernel has none (CONFIG_USERFAULTFD), or a seccomp filter hides it",
            );
        }
        write!(f, "the system call failed ({})", ErrnoName(syscall))?;
        if let Some(errno) = device {
            write!(f, " and so did /dev/userfaultfd ({})", ErrnoName(errno))?;
        }
        f.write_str(
            "; set vm.unprivileged_userfaultfd=1, or give this user access to /dev/userfaultfd",
        )
    }
}

struct RefusedText(Errno);

impl fmt::Display for RefusedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Errno::PERM => f.write_str("; fork events need CAP_SYS_PTRACE"),
            errno => write!(f, " ({})", ErrnoName(errno)),
        }
    }
}

impl OpenError {
    /// The kernel's answer to what was tried first.
    pub fn errno(self) -> Errno {
        match self {
            OpenError::Denied { syscall: errno, .. } | OpenError::Refused { errno, .. } => errno,
            OpenError::Unsupported { .. } => Errno::INVAL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_print_by_name() {
        assert_eq!(std::format!("{:?}", Features::MOVE | Features::EVENT_FORK), "EVENT_FORK|MOVE");
        assert_eq!(std::format!("{:?}", Features::from_bits_retain(1 << 40)), "bit40");
        assert_eq!(std::format!("{:?}", Features::empty()), "none");
        assert!((Features::MOVE | Features::POISON).contains(Features::POISON));
    }
}
