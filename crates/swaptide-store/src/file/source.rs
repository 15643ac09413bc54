//! Where a device gets the pieces of the swap file from, and gives them back to.

/// A piece of the swap file: the bytes from `EXTENT_BYTES` times this number on.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct Extent(pub u32);

/// The source of a device's extents.
///
/// Called with the device's lock held: must not call back into the device.
pub trait ExtentSource: Sync {
    /// An extent that no other process has, or `None` when the file may not grow.
    fn lease(&self) -> Option<Extent>;

    /// Gives an extent back. `exclusive_hole_punch` tells that it was exclusively this device's and
    /// its space has been given back to the file system already; otherwise another process may
    /// still read it (see [`super::FileDevice::freeze_all`]) or the file system refused.
    fn release(&self, extent: Extent, exclusive_hole_punch: bool);

    /// Gives an extent back that others may refer to. True when none does: then it is the
    /// caller's alone once more, to be punched and given back.
    fn release_shared(&self, extent: Extent) -> bool {
        self.release(extent, false);
        false
    }

    /// True if what lies in a leased extent is not to be encrypted.
    fn is_plain(&self, _extent: Extent) -> bool {
        false
    }

    /// True if what lies in a leased extent lies on a rotational device: a read costs a seek, and
    /// its neighbours cost nothing more.
    fn is_rotational(&self, _extent: Extent) -> bool {
        false
    }

    /// A write into a leased extent failed: for a while, what is leased shall lie elsewhere. Gives
    /// whether there is anywhere else.
    fn back_off(&self, _extent: Extent) -> bool {
        false
    }

    /// This process may not write where a leased extent lies, as its own limit on the size of files
    /// says: for a while, it leases nothing there, even if there is nothing elsewhere.
    fn bar(&self, _extent: Extent) {}

    /// True if a server may still carry out an earlier write or trim there: nothing more is written
    /// to it then, and nothing trimmed, and the source lets no process lease it.
    fn is_in_doubt(&self, _extent: Extent) -> bool {
        false
    }

    /// True if a leased extent lies on a server, with a mirror or without: giving its space back
    /// takes an unknown time.
    fn is_on_server(&self, extent: Extent) -> bool {
        self.server_of(extent).is_some()
    }

    /// True if giving a leased extent's space back is left to
    /// [`super::FileDevice::release_one_extent`]: the thread that frees its last page must not wait
    /// for a file system.
    fn defers_release(&self, _extent: Extent) -> bool {
        false
    }

    /// The server that alone has what lies in a leased extent, if that is so: reading it takes
    /// an unknown time.
    fn server_of(&self, _extent: Extent) -> Option<ServerId> {
        None
    }
}

/// Tells the servers apart that have pages: what one does says nothing of another.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct ServerId(pub u8);
