//! A swap area as the segment has it: its number, its life, its words.
//!
//! Rules and invariants: [`crate::areas`].

use std::sync::atomic::{
    AtomicI32, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::SeqCst, fence,
};

use crate::ids::MAX_EXTENTS;

/// Areas that there can be at one time.
pub const MAX_AREAS: usize = 16;

/// The number of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AreaId(pub u8);

/// The life-cycle state of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AreaState {
    /// The number is free: no area has it.
    None = 0,
    /// Extents are leased and written.
    Open = 1,
    /// No extent is leased any more, and holders move what lies there elsewhere.
    Closed = 2,
    /// No extent is leased, and what lies there stays: its server is away, and may come back.
    Paused = 3,
    /// Has no extents: it holds copies of what is on another area.
    Mirror = 4,
}

/// The kind of an area's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Transport {
    /// A file or a block device, the same one for all processes.
    File = 0,
    /// A socket on which an NBD server waits for requests, another one for each process.
    Nbd = 1,
}

/// The record of an area in the segment.
#[repr(C)]
pub struct Area {
    pub(crate) state: AtomicU32,
    pub(crate) generation: AtomicU32,
    pub(crate) transport: AtomicU32,
    pub(crate) priority: AtomicI32,
    pub(crate) span: AreaSpan,
    /// Extents that are leased now.
    pub(crate) used: AtomicU32,
    /// The index in the area at which the next search for a free extent starts.
    pub(crate) hint: AtomicU32,
    /// Transfers that failed, as processes count them.
    pub(crate) errors: AtomicU32,
    /// The offset in bytes of its first extent on the device.
    pub(crate) base_bytes: AtomicU64,
    /// Of a network export, as `export`: see [`ExportFacts`].
    pub(crate) export_bytes: AtomicU64,
    pub(crate) export: ExportWords,
    /// Number of its mirror and one more; 0 for none.
    pub(crate) mirror: AtomicU32,
    /// Not 0: what lies there is not encrypted.
    pub(crate) plain: AtomicU32,
    /// Not 0: the device is rotational.
    pub(crate) rotational: AtomicU32,
    /// Extents that no process holds and none can lease (see [`crate::areas`]), at the supervisor's
    /// last check.
    pub(crate) in_doubt: AtomicU32,
}

/// The extents of an area among all. Written while the area is none, and read with the bounds of
/// the table.
#[repr(C)]
pub(crate) struct AreaSpan {
    /// The number of the first.
    pub(crate) first: AtomicU32,
    pub(crate) count: AtomicU32,
}

/// [`ExportFacts`] but for the bytes, as they stand in the segment.
#[repr(C)]
pub(crate) struct ExportWords {
    /// The transmission flags, and bit 16 for structured replies.
    pub(crate) flags: AtomicU32,
    pub(crate) longest: AtomicU32,
    pub(crate) connections: AtomicU32,
}

#[cfg(test)]
pub(crate) const MIRROR_AT: usize = std::mem::offset_of!(Area, mirror);

/// The facts negotiated with the server of a network export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportFacts {
    /// Bytes of the export.
    pub bytes: u64,
    /// The transmission flags of the protocol.
    pub flags: u16,
    /// True if replies may be structured.
    pub structured: bool,
    /// The longest transfer that the server takes.
    pub longest: u32,
    /// Connections to use at most.
    pub connections: u32,
}

/// A place on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Its area.
    pub area: AreaId,
    /// The area's generation.
    pub generation: u32,
    /// Its first byte on the device.
    pub offset: u64,
}

/// The location of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentPlace {
    /// Its area.
    pub area: AreaId,
    /// The area's generation.
    pub generation: u32,
    /// Its first byte on the device.
    pub offset: u64,
    /// The place of its copy.
    pub mirror: Option<Spot>,
}

/// A set of areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaMask(pub u32);

impl AreaMask {
    /// All areas.
    pub const ALL: AreaMask = AreaMask(u32::MAX);

    /// True if an area is in it.
    pub const fn contains(self, area: AreaId) -> bool {
        self.0 >> area.0 & 1 == 1
    }
}

/// An area as it is added.
#[derive(Clone, Copy, Debug)]
pub struct NewArea {
    /// Its transport.
    pub transport: Transport,
    /// The higher one is used first.
    pub priority: i32,
    /// The number of its extents.
    pub extents: u32,
    /// The offset in bytes of the first one on the device.
    pub base_bytes: u64,
    /// What is known of it if it is a network export.
    pub export: ExportFacts,
    /// Where copies of what lies there are kept.
    pub mirror: Option<AreaId>,
    /// Its data is not encrypted.
    pub plain: bool,
    /// It lies on a rotational device: a read begins with a seek.
    pub rotational: bool,
}

impl NewArea {
    /// A file, from its first byte on.
    pub const fn of_file(priority: i32, extents: u32) -> NewArea {
        let export =
            ExportFacts { bytes: 0, flags: 0, structured: false, longest: 0, connections: 0 };
        NewArea {
            transport: Transport::File,
            priority,
            extents,
            base_bytes: 0,
            export,
            mirror: None,
            plain: false,
            rotational: false,
        }
    }
}

impl Area {
    /// Returns its life-cycle state.
    pub fn state(&self) -> AreaState {
        match self.state.load(SeqCst) {
            1 => AreaState::Open,
            2 => AreaState::Closed,
            3 => AreaState::Paused,
            4 => AreaState::Mirror,
            _ => AreaState::None,
        }
    }

    /// How it is read and written.
    pub fn transport(&self) -> Transport {
        if self.transport.load(Relaxed) == Transport::Nbd as u32 {
            Transport::Nbd
        } else {
            Transport::File
        }
    }

    /// The higher one is leased from first.
    pub fn priority(&self) -> i32 {
        self.priority.load(Relaxed)
    }

    /// Counts how often it was given to another device.
    pub fn generation(&self) -> u32 {
        self.generation.load(Acquire)
    }

    /// Returns the number of its extents; at most the number that the table can hold, even if it is
    /// damaged.
    pub fn extents(&self) -> u32 {
        self.span.count.load(Relaxed).min(MAX_EXTENTS as u32)
    }

    /// How many of them are leased; one more than there are numbers where a damaged table says
    /// more.
    pub fn used(&self) -> u32 {
        self.used.load(SeqCst).min(MAX_EXTENTS as u32 + 1)
    }

    /// Returns the number that no process can lease, for a server may still carry out something
    /// there.
    pub fn in_doubt(&self) -> u32 {
        self.in_doubt.load(Relaxed).min(MAX_EXTENTS as u32)
    }

    /// Notes how many those are. Supervisor only.
    pub fn set_in_doubt(&self, extents: u32) {
        self.in_doubt.store(extents, Relaxed);
    }

    /// Returns the number that can be leased.
    pub fn free(&self) -> u32 {
        self.extents().saturating_sub(self.used()).saturating_sub(self.in_doubt())
    }

    /// True if there is one that can be leased.
    pub fn has_room(&self) -> bool {
        self.free() > 0
    }

    /// Transfers that failed so far.
    pub fn errors(&self) -> u32 {
        self.errors.load(Relaxed)
    }

    /// One more transfer failed.
    pub fn count_error(&self) {
        self.errors.fetch_add(1, Relaxed);
    }

    /// True if what lies there is not encrypted.
    pub fn is_unencrypted(&self) -> bool {
        self.plain.load(Relaxed) != 0
    }

    /// True if it lies on a rotational device.
    pub fn is_rotational(&self) -> bool {
        self.rotational.load(Relaxed) != 0
    }

    /// Returns the negotiated facts of a network export.
    pub fn export(&self) -> ExportFacts {
        let flags = self.export.flags.load(Relaxed);
        ExportFacts {
            bytes: self.export_bytes.load(Relaxed),
            flags: flags as u16,
            structured: flags >> 16 != 0,
            longest: self.export.longest.load(Relaxed),
            connections: self.export.connections.load(Relaxed),
        }
    }

    /// The area that holds copies of this one's extents.
    pub fn mirror(&self) -> Option<AreaId> {
        // Whatever a damaged table says, there are no others.
        self.mirror
            .load(Relaxed)
            .checked_sub(1)
            .filter(|id| (*id as usize) < MAX_AREAS)
            .map(|id| AreaId(id as u8))
    }

    /// True if it was given to another device since `generation` was read: what was read of it in
    /// between counts for nothing then.
    pub(crate) fn changed_since(&self, generation: u32) -> bool {
        fence(Acquire);
        self.generation.load(Relaxed) != generation
    }

    pub(crate) fn range(&self) -> std::ops::Range<u32> {
        // Whatever a damaged table says, there are no others.
        let end =
            self.span.first.load(Relaxed).saturating_add(self.extents()).min(MAX_EXTENTS as u32);
        self.span.first.load(Relaxed).min(end)..end
    }
}
