//! Several devices as one swap space: priorities, rotation among equals, masks of permitted types.
//! (docs/linux-swap.md, "Devices and priorities")
//!
//! Invariants:
//! 1. A device of higher priority is used before one of lower priority, as far as the mask permits
//!    it.
//! 2. Devices of one priority take turns, one cluster's worth of slots each: turns per slot would
//!    tear neighbours apart.
//! 3. A permitted device that has room but no run of the order sends the folio to its peers, never
//!    to a lower priority: the caller splits the folio instead.
//!
//! Lock: `order`, outermost and held only to read or turn the order of devices.

use crate::device::SwapDevice;
use crate::entry::{SlotContent, SlotInfo};
use crate::error::AllocError;
use crate::ids::{
    CpuId, FolioId, GroupId, Order, SLOTS_PER_CLUSTER, SWAP_TYPES, SwapEntry, SwapType,
};
use crate::sync::{Published, SpinLock};
use core::fmt;

/// A set of swap types.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TypeMask(u8);

impl TypeMask {
    /// Every type.
    pub const ALL: TypeMask = TypeMask((1 << SWAP_TYPES) - 1);
    /// No type.
    pub const NONE: TypeMask = TypeMask(0);

    /// This type alone.
    pub const fn only(ty: SwapType) -> Self {
        TypeMask(1 << ty.index())
    }

    /// With `ty`.
    pub const fn with(self, ty: SwapType) -> Self {
        TypeMask(self.0 | 1 << ty.index())
    }

    /// Without `ty`.
    pub const fn without(self, ty: SwapType) -> Self {
        TypeMask(self.0 & !(1 << ty.index()))
    }

    /// Is `ty` in it?
    pub const fn contains(self, ty: SwapType) -> bool {
        self.0 >> ty.index() & 1 == 1
    }
}

impl fmt::Debug for TypeMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TypeMask({:#06b})", self.0)
    }
}

/// Why a device was not added or taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// A device of that type is there already.
    #[error("swap {0} is taken: choose another number")]
    Exists(SwapType),
    /// There is no device of that type.
    #[error("there is no swap device of {0}")]
    NoDevice(SwapType),
    /// The number of slots that are still in use: swap them in, or move them to another device,
    /// then try again.
    #[error("{1} slots of swap {0} are in use: bring them back first")]
    InUse(SwapType, u32),
    /// The number of slots that find no room on the others: free some, or add a device.
    #[error("{1} slots of swap {0} find no room on the other devices: free some, or add a device")]
    NoRoom(SwapType, u32),
    /// The number of slots that could not be moved, because their owner could not change their
    /// users: try again.
    #[error("{1} slots of swap {0} could not be moved just now: try again")]
    Refused(SwapType, u32),
}

#[derive(Clone, Copy)]
struct PriorityEntry {
    ty: SwapType,
    priority: i32,
    /// Slots left of its turn.
    turn: u32,
}

/// Up to [`SWAP_TYPES`] devices.
#[derive(Default)]
pub struct SwapSpace {
    devices: [Published<SwapDevice>; SWAP_TYPES],
    /// By priority, highest first; equals in the order of their turns.
    order: SpinLock<Vec<PriorityEntry>>,
}

impl SwapSpace {
    /// A space without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device. Higher priorities are used first.
    ///
    /// # Errors
    /// [`SpaceError::Exists`]: its type is taken.
    pub fn add(&self, device: SwapDevice, priority: i32) -> Result<SwapType, SpaceError> {
        let ty = device.ty();
        self.devices[ty.index()].set(device).map_err(|_| SpaceError::Exists(ty))?;
        let mut order = self.order.lock();
        let at = order.partition_point(|p| p.priority >= priority);
        order.insert(at, PriorityEntry { ty, priority, turn: SLOTS_PER_CLUSTER as u32 });
        Ok(ty)
    }

    /// Takes an unused device away, so that its type is free for another one; close it with
    /// [`SwapDevice::set_allocation_enabled`] and empty it before ([`SwapSpace::swapoff`] does
    /// both).
    ///
    /// # Errors
    /// [`SpaceError::InUse`] with the number of used slots, [`SpaceError::NoDevice`].
    pub fn take(&mut self, ty: SwapType) -> Result<SwapDevice, SpaceError> {
        let place = &mut self.devices[ty.index()];
        match place.get().map(SwapDevice::used) {
            None => return Err(SpaceError::NoDevice(ty)),
            Some(0) => {}
            Some(used) => return Err(SpaceError::InUse(ty, used)),
        }
        self.order.lock().retain(|p| p.ty != ty);
        place.take().ok_or(SpaceError::NoDevice(ty))
    }

    /// The device of that type.
    #[inline]
    pub fn device(&self, ty: SwapType) -> Option<&SwapDevice> {
        self.devices[ty.index()].get()
    }

    /// All devices.
    pub fn devices(&self) -> impl Iterator<Item = &SwapDevice> {
        self.devices.iter().filter_map(Published::get)
    }

    /// Returns the content of the entry's slot; bad if there is no such device. Takes no lock.
    #[inline]
    pub fn lookup(&self, entry: SwapEntry) -> SlotContent {
        self.device(entry.ty()).map_or(SlotContent::Bad, |device| device.lookup(entry.offset()))
    }

    /// Like [`SwapSpace::lookup`], with count, zero flag and group; `None` when there is no such
    /// device.
    pub fn info(&self, entry: SwapEntry) -> Option<SlotInfo> {
        self.device(entry.ty()).map(|device| device.info(entry.offset()))
    }

    /// Used slots and capacity of all permitted devices together.
    pub fn used_of_capacity(&self, mask: TypeMask) -> (u64, u64) {
        let permitted = self.devices().filter(|device| mask.contains(device.ty()));
        permitted.fold((0, 0), |(used, capacity), d| {
            (used + u64::from(d.used()), capacity + u64::from(d.capacity()))
        })
    }

    /// Bytes of memory all devices hold.
    pub fn metadata_bytes(&self) -> usize {
        let devices: usize = self.devices().map(SwapDevice::metadata_bytes).sum();
        devices + size_of::<Self>() + self.order.lock().capacity() * size_of::<PriorityEntry>()
    }

    /// Allocates slots for a folio on the best of the permitted devices. See
    /// [`SwapDevice::alloc_folio`].
    ///
    /// # Errors
    /// [`AllocError::NoRun`] when a device had room but no run, [`AllocError::Full`] when all were
    /// full, [`AllocError::Disabled`] when none was open or permitted.
    pub fn alloc_folio(
        &self,
        mask: TypeMask,
        cpu: CpuId,
        order: Order,
        folio: FolioId,
        group: GroupId,
    ) -> Result<SwapEntry, AllocError> {
        let mut places = [None; SWAP_TYPES];
        for (place, known) in places.iter_mut().zip(self.order.lock().iter()) {
            *place = Some((known.ty, known.priority));
        }
        let mut error = AllocError::Disabled;
        let mut no_run_at = None;
        for (ty, priority) in places.into_iter().flatten().filter(|(ty, _)| mask.contains(*ty)) {
            if no_run_at.is_some_and(|p| p > priority) {
                break;
            }
            let Some(device) = self.device(ty) else { continue };
            match device.alloc_folio(cpu, order, folio, group) {
                Ok(off) => {
                    self.took(ty, order.pages());
                    return Ok(SwapEntry::new(ty, off));
                }
                Err(AllocError::NoRun) => {
                    no_run_at = Some(priority);
                    error = AllocError::NoRun;
                }
                Err(AllocError::Disabled) => {}
                Err(other) if error != AllocError::NoRun => error = other,
                Err(_) => {}
            }
        }
        Err(error)
    }

    /// `ty` gave `pages` slots: at the end of its turn it goes behind its equals.
    fn took(&self, ty: SwapType, pages: u32) {
        let mut order = self.order.lock();
        let Some(at) = order.iter().position(|p| p.ty == ty) else { return };
        let place = &mut order[at];
        place.turn = place.turn.saturating_sub(pages);
        if place.turn > 0 {
            return;
        }
        place.turn = SLOTS_PER_CLUSTER as u32;
        let priority = place.priority;
        let equals = order[at..].iter().take_while(|p| p.priority == priority).count();
        order[at..at + equals].rotate_left(1);
    }
}
