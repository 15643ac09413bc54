//! What an area is read and written through, and how a forked child gets it.

use swaptide_sys::{AsFd, BorrowedFd, OwnedFd};

use crate::nbd::{Dialer, Export};

/// The means by which an area is read and written.
pub enum Opened {
    /// A file or a block device.
    File(OwnedFd),
    /// An export of an NBD server: a connection, and the way to more of them.
    Nbd {
        /// A socket in the transmission phase; none while none can be made: [`Dialer`] is
        /// asked for one until the call's time is over.
        connection: Option<OwnedFd>,
        /// The facts negotiated with its server.
        export: Export,
        /// Makes further connections.
        dialer: Box<dyn Dialer>,
    },
}

impl Opened {
    /// The descriptor that another process could use as well; a connection is one process's.
    #[must_use]
    pub fn shareable(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Opened::File(fd) => Some(fd.as_fd()),
            Opened::Nbd { .. } => None,
        }
    }
}

/// A descriptor that a forked child is given.
pub struct HandedOver {
    /// Number of the area that it is of.
    pub area: u8,
    /// Generation of the area when it was opened.
    pub generation: u32,
    /// The child's own descriptor.
    pub opened: Opened,
}

impl core::fmt::Debug for HandedOver {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "area {} of generation {}", self.area, self.generation)
    }
}
