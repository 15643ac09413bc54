//! A device and a plain map of slots, and the operations that are done to both.
//!
//! Shared by the property test (`tests/model.rs`) and the fuzz target (`fuzz/`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use swaptide_core::*;

#[derive(Clone, Copy, Debug, PartialEq)]
struct Model {
    /// `Ok`: a folio; `Err`: a shadow.
    holds: Result<u32, u32>,
    count: u32,
    zero: bool,
    group: u16,
}

#[derive(Clone, Debug)]
pub enum Op {
    Alloc {
        cpu: u16,
        order: u8,
        folio: u32,
        group: u16,
    },
    /// The rest act on a range near a slot in use, `at` chooses which.
    ToShadow {
        at: usize,
        n: u32,
        shadow: u32,
        zero: u64,
    },
    ToFolio {
        at: usize,
        n: u32,
        folio: u32,
    },
    Replace {
        at: usize,
        n: u32,
        to: u32,
    },
    Dup {
        at: usize,
        n: u32,
        times: u32,
    },
    Put {
        at: usize,
        n: u32,
        times: u32,
    },
    Free {
        at: usize,
        n: u32,
        expect: u8,
    },
    Release {
        at: usize,
        n: u32,
    },
    Zero {
        at: usize,
        n: u32,
        zero: bool,
    },
    Discard,
    Limit {
        limit: u32,
    },
    /// Closes the device, empties a share of it, opens it again.
    Drain {
        keep: u32,
    },
    /// Moves slots together; every slot whose number divides by `refuse` is held by its user.
    Compact {
        max: u32,
        tear: bool,
        refuse: u32,
    },
    /// Moves everything to a second device of that size (swapoff), and back.
    Swapoff {
        room: u32,
    },
}

/// The users of the slots: the model, as far as its slots move.
struct Users<'a> {
    /// What the slots of the device that moves hold, and of the other one.
    from: &'a mut BTreeMap<u32, Model>,
    to: &'a mut BTreeMap<u32, Model>,
    refuse: u32,
}

/// The state of a slot as the device should show it, with its exact count.
fn shown(m: &Model) -> SlotInfo {
    let slot = match m.holds {
        Ok(folio) => SlotContent::Folio(FolioId(folio)),
        Err(shadow) => SlotContent::Shadow { shadow: Shadow(shadow), zero: m.zero },
    };
    SlotInfo { slot, count: m.count, zero: m.zero, group: GroupId(m.group) }
}

impl Mover for Users<'_> {
    fn switch(&mut self, slots: &Move<'_>) -> bool {
        if slots.each().any(|(from, ..)| self.refuse > 0 && from.offset().0 % self.refuse == 0) {
            return false;
        }
        let same_device = slots.from.ty() == slots.to.ty();
        for (from, to, info) in slots.each() {
            let m = self.from.remove(&from.offset().0).expect("a slot that moves is in use");
            assert_eq!(shown(&m), info, "{from}");
            let to_map = if same_device { &mut *self.from } else { &mut *self.to };
            assert_eq!(to_map.insert(to.offset().0, m), None, "{to} was in use");
        }
        true
    }
}

pub struct Pair {
    space: SwapSpace,
    model: BTreeMap<u32, Model>,
    bad: BTreeSet<u32>,
    freed: Arc<Mutex<Vec<u32>>>,
    slots: u32,
    limit: u32,
}

const DEVICE: SwapType = SwapType::new(1).unwrap();
const OTHER: SwapType = SwapType::new(2).unwrap();

impl Pair {
    pub fn new(slots: u32, discard: bool, kind: Kind) -> Pair {
        let freed = Arc::new(Mutex::new(Vec::new()));
        let to = freed.clone();
        let device = SwapDevice::new(DEVICE, slots, 2, kind)
            .with_discard(discard)
            .with_free_notify(Box::new(move |off, n| to.lock().unwrap().extend(off.0..off.0 + n)));
        let bad = BTreeSet::from([0, 1, 777]);
        bad.iter().for_each(|&off| device.mark_bad(SwapOffset(off), 1).unwrap());
        let space = SwapSpace::new();
        space.add(device, 0).unwrap();
        Pair { space, model: BTreeMap::new(), bad, freed, slots, limit: u32::MAX }
    }

    fn device(&self) -> &SwapDevice {
        self.space.device(DEVICE).unwrap()
    }

    fn compact(&mut self, max: u32, tear: bool, refuse: u32) {
        let device = self.space.device(DEVICE).unwrap();
        let tables = device.usage().tables;
        let (mut model, mut nowhere) = (std::mem::take(&mut self.model), BTreeMap::new());
        let done =
            device.compact(max, tear, &mut Users { from: &mut model, to: &mut nowhere, refuse });
        self.model = model;
        assert_eq!(device.usage().tables, tables - done.emptied);
        assert!(done.moved <= max.saturating_add(511) && nowhere.is_empty());
        assert_eq!(self.freed.lock().unwrap().as_slice(), [], "a slot that moves is not freed");
    }

    fn swapoff(&mut self, room: u32) {
        self.space.add(SwapDevice::new(OTHER, room, 1, Kind::Solid), -1).unwrap();
        let (used, other) = (self.model.len() as u32, &mut BTreeMap::new());
        // All the units are single slots, or the runs that they are find one: then only room
        // decides.
        let outcome = self.space.swapoff(
            DEVICE,
            TypeMask::ALL,
            &mut Users { from: &mut self.model, to: other, refuse: 0 },
        );
        let (here, there) = (self.device(), self.space.device(OTHER).unwrap());
        assert_eq!((here.used(), there.used()), (self.model.len() as u32, other.len() as u32));
        assert_eq!(here.used() + there.used(), used);
        match outcome {
            Ok(_) => assert!(
                here.used() == 0
                    && !here.allocation_enabled()
                    && here.usage().tables == self.open_for_ever()
            ),
            Err(SpaceError::NoRoom(_, left)) => {
                assert!(left == here.used() && left > 0 && here.allocation_enabled());
                assert!(
                    room < used || self.model.values().any(|m| m.holds.is_ok()),
                    "only folios need runs"
                );
            }
            Err(other) => panic!("{other}"),
        }
        for (off, m) in other.iter() {
            assert_eq!(
                SlotInfo { count: there.count(SwapOffset(*off)), ..there.info(SwapOffset(*off)) },
                shown(m)
            );
        }
        // Back again. Folios may find no run here any more: they are given up, like everything that
        // is left there.
        here.set_allocation_enabled(true);
        here.set_limit(u32::MAX);
        let back = self.space.swapoff(
            OTHER,
            TypeMask::ALL,
            &mut Users { from: other, to: &mut self.model, refuse: 0 },
        );
        assert_eq!(back.is_err(), !other.is_empty(), "{back:?}");
        self.space.device(OTHER).unwrap().set_allocation_enabled(false);
        for (off, m) in other.iter() {
            let there = self.space.device(OTHER).unwrap();
            (1..m.count).for_each(|_| _ = there.put(SwapOffset(*off), 1).unwrap());
            there.free(SwapOffset(*off), 1, Expect::Any).unwrap();
        }
        self.space.take(OTHER).unwrap();
        self.device().set_limit(self.limit);
        assert_eq!(
            self.freed.lock().unwrap().drain(..).count(),
            0,
            "a slot that moves is not freed"
        );
    }

    /// Clusters that keep a table because of bad slots.
    fn open_for_ever(&self) -> u32 {
        let tail = (!self.slots.is_multiple_of(512)).then_some(self.slots / 512);
        self.bad.iter().map(|slot| slot / 512).chain(tail).collect::<BTreeSet<_>>().len() as u32
    }

    /// A range near the `at`-th used slot: its start, and where it starts in the model.
    fn range(&self, at: usize, n: u32) -> (SwapOffset, u32) {
        let off = if self.model.is_empty() {
            at as u32 % self.slots
        } else {
            *self.model.keys().nth(at % self.model.len()).unwrap()
        };
        let off = if n.is_power_of_two() { off & !(n - 1) } else { off };
        (SwapOffset(off), n)
    }

    /// Checks `result` against what the model says of each slot; applies `change` when all match
    /// (`None` from it: free).
    fn expect<T: std::fmt::Debug>(
        &mut self,
        (off, n): (SwapOffset, u32),
        result: Result<T, Mismatch>,
        right: impl Fn(&Model) -> bool,
        change: impl Fn(u32, &mut Model) -> bool,
    ) {
        let fits = off.0 % 512 + n <= 512 && off.0 + n <= self.slots;
        let wrong = (off.0..off.0 + n).find(|slot| !self.model.get(slot).is_some_and(&right));
        let freed = std::mem::take(&mut *self.freed.lock().unwrap());
        if !fits {
            assert_eq!(result.unwrap_err().expected, Expected::Range);
            assert_eq!(freed, []);
            return;
        }
        if let Some(wrong) = wrong {
            let mismatch = result.unwrap_err();
            // `free` looks at the counts last: a count too large may come before what it complains
            // about.
            let counts = self.model.get(&wrong).is_some_and(|m| m.count > 1)
                || mismatch.expected == Expected::LastUser;
            assert!(
                mismatch.entry.offset().0 == wrong || counts,
                "{mismatch}, but slot {wrong} is wrong first"
            );
            assert_eq!(
                mismatch.gone(),
                !self.model.contains_key(&mismatch.entry.offset().0)
                    && !self.bad.contains(&mismatch.entry.offset().0)
            );
            assert_eq!(freed, []);
            return;
        }
        result.unwrap();
        let mut gone = Vec::new();
        for slot in off.0..off.0 + n {
            if !change(slot - off.0, self.model.get_mut(&slot).unwrap()) {
                self.model.remove(&slot);
                gone.push(slot);
            }
        }
        assert_eq!(freed, gone);
    }

    fn alloc(&mut self, cpu: u16, order: u8, folio: u32, group: u16) {
        let pages = 1u32 << order;
        let used = self.model.len() as u32;
        let result = self.device().alloc_folio(
            CpuId(cpu),
            Order::new(order).unwrap(),
            FolioId(folio),
            GroupId(group),
        );
        let capacity = (self.slots - self.bad.len() as u32).min(self.limit);
        match result {
            Ok(off) => {
                assert_eq!(off.0 % pages, 0);
                assert!(used + pages <= capacity);
                for slot in off.0..off.0 + pages {
                    let new = Model { holds: Ok(folio), count: 1, zero: false, group };
                    assert_eq!(self.model.insert(slot, new), None, "slot {slot} was in use");
                    assert!(!self.bad.contains(&slot) && slot < self.slots);
                }
            }
            Err(AllocError::Full) => assert!(used + pages > capacity),
            Err(AllocError::NoRun) => {
                assert_ne!(order, 0);
                assert!(used + pages <= capacity);
                let empty = (0..self.slots / 512).find(|c| {
                    let range = c * 512..(c + 1) * 512;
                    self.model.range(range.clone()).next().is_none()
                        && self.bad.range(range).next().is_none()
                });
                assert_eq!(empty, None, "an empty cluster serves every order");
            }
            Err(other) => panic!("{other}"),
        }
    }

    pub fn apply(&mut self, op: Op) {
        match op {
            Op::Alloc { cpu, order, folio, group } => self.alloc(cpu, order, folio, group),
            Op::ToShadow { at, n, shadow, zero } => {
                let range = self.range(at, n);
                let folio = self.folio_at(range.0);
                let mask = [zero, !zero];
                let result = self.device().folio_to_shadow(
                    range.0,
                    n,
                    FolioId(folio),
                    Shadow(shadow),
                    ZeroMask::Bits(&mask),
                );
                self.expect(
                    range,
                    result,
                    |m| m.holds == Ok(folio),
                    |i, m| {
                        (m.holds, m.zero) = (
                            Err(shadow),
                            mask.get(i as usize / 64).is_some_and(|w| w >> (i % 64) & 1 == 1),
                        );
                        m.count > 0
                    },
                );
            }
            Op::ToFolio { at, n, folio } => {
                let range = self.range(at, n);
                let alike = {
                    let first = self.model.get(&range.0.0).copied();
                    let same = |m: &Model| {
                        m.holds.is_err()
                            && first.is_some_and(|f| (f.zero, f.group) == (m.zero, m.group))
                    };
                    (range.0.0..range.0.0 + n).all(|slot| self.model.get(&slot).is_some_and(same))
                };
                let fits = range.0.0 % 512 + n <= 512;
                assert_eq!(self.device().swap_in_range(range.0, n).is_some(), alike && fits);
                let mut shadows = vec![Shadow(0); n as usize];
                let result =
                    self.device().shadow_to_folio(range.0, n, FolioId(folio), Some(&mut shadows));
                self.expect(
                    range,
                    result,
                    |m| m.holds.is_err(),
                    |i, m| {
                        assert_eq!(m.holds, Err(shadows[i as usize].0));
                        m.holds = Ok(folio);
                        true
                    },
                );
            }
            Op::Replace { at, n, to } => {
                let range = self.range(at, n);
                let from = self.folio_at(range.0);
                let result = self.device().replace_folio(range.0, n, FolioId(from), FolioId(to));
                self.expect(
                    range,
                    result,
                    |m| m.holds == Ok(from),
                    |_, m| {
                        m.holds = Ok(to);
                        true
                    },
                );
            }
            Op::Dup { at, n, times } => {
                for _ in 0..times {
                    let range = self.range(at, n);
                    let result = self.device().dup(range.0, n);
                    self.expect(
                        range,
                        result,
                        |_| true,
                        |_, m| {
                            m.count += 1;
                            true
                        },
                    );
                }
            }
            Op::Put { at, n, times } => {
                for _ in 0..times {
                    let range = self.range(at, n);
                    let result = self.device().put(range.0, n);
                    self.expect(
                        range,
                        result,
                        |m| m.count > 0,
                        |_, m| {
                            m.count -= 1;
                            m.count > 0 || m.holds.is_ok()
                        },
                    );
                }
            }
            Op::Free { at, n, expect } => {
                let range = self.range(at, n);
                let folio = self.folio_at(range.0);
                let expect = [Expect::Any, Expect::Shadow, Expect::Folio(FolioId(folio))]
                    [usize::from(expect)];
                let result = self.device().free(range.0, n, expect);
                let right = move |m: &Model| {
                    let holds = match expect {
                        Expect::Any => true,
                        Expect::Shadow => m.holds.is_err(),
                        Expect::Folio(f) => m.holds == Ok(f.0),
                    };
                    holds && m.count <= 1
                };
                self.expect(range, result, right, |_, _| false);
            }
            Op::Release { at, n } => {
                let range = self.range(at, n);
                let folio = self.folio_at(range.0);
                let result = self.device().folio_release(range.0, n, FolioId(folio));
                self.expect(range, result, |m| m.holds == Ok(folio) && m.count == 0, |_, _| false);
            }
            Op::Zero { at, n, zero } => {
                let range = self.range(at, n);
                let result = self.device().set_zero(
                    range.0,
                    n,
                    if zero { ZeroMask::All } else { ZeroMask::None },
                );
                self.expect(
                    range,
                    result,
                    |_| true,
                    |_, m| {
                        m.zero = zero;
                        true
                    },
                );
            }
            Op::Discard => {
                for index in self.device().take_emptied(usize::MAX) {
                    let range = index.first().0..index.first().0 + 512;
                    assert_eq!(self.model.range(range).next(), None, "{index} is in use");
                    self.device().discard_done(index);
                }
            }
            Op::Limit { limit } => {
                self.limit = limit;
                self.device().set_limit(limit);
            }
            Op::Compact { max, tear, refuse } => self.compact(max, tear, refuse),
            Op::Swapoff { room } => self.swapoff(room),
            Op::Drain { keep } => {
                self.device().set_allocation_enabled(false);
                let refused =
                    self.device().alloc_folio(CpuId(0), Order::ZERO, FolioId(0), GroupId(0));
                assert!(matches!(refused, Err(AllocError::Disabled | AllocError::Full)));
                let met: Vec<u32> = self.device().drain().map(|(off, _)| off.0).collect();
                assert!(met.iter().eq(self.model.keys()));
                for slot in met {
                    if keep > 0 && slot % (keep + 1) != 0 {
                        continue;
                    }
                    while self.model.get(&slot).is_some_and(|m| m.count > 1) {
                        let result = self.device().put(SwapOffset(slot), 1);
                        self.expect(
                            (SwapOffset(slot), 1),
                            result,
                            |_| true,
                            |_, m| {
                                m.count -= 1;
                                true
                            },
                        );
                    }
                    let result = self.device().free(SwapOffset(slot), 1, Expect::Any);
                    self.expect((SwapOffset(slot), 1), result, |_| true, |_, _| false);
                }
                self.device().set_allocation_enabled(true);
            }
        }
    }

    fn folio_at(&self, off: SwapOffset) -> u32 {
        self.model.get(&off.0).and_then(|m| m.holds.ok()).unwrap_or(3)
    }

    /// The whole device against the whole model.
    pub fn check(&self) {
        for slot in 0..self.slots {
            let info = self.device().info(SwapOffset(slot));
            match self.model.get(&slot) {
                None if self.bad.contains(&slot) => assert_eq!(info.slot, SlotContent::Bad),
                None => assert_eq!(
                    info,
                    SlotInfo { slot: SlotContent::Free, count: 0, zero: false, group: GroupId(0) }
                ),
                Some(m) => {
                    let holds = match m.holds {
                        Ok(folio) => SlotContent::Folio(FolioId(folio)),
                        Err(shadow) => SlotContent::Shadow { shadow: Shadow(shadow), zero: m.zero },
                    };
                    assert_eq!(
                        info,
                        SlotInfo {
                            slot: holds,
                            count: m.count.min(255),
                            zero: m.zero,
                            group: GroupId(m.group)
                        }
                    );
                    if m.count >= 255 {
                        assert_eq!(self.device().count(SwapOffset(slot)), m.count);
                    }
                }
            }
        }
        let usage = self.device().usage();
        assert_eq!((usage.used, usage.bad), (self.model.len() as u32, self.bad.len() as u32));
        let tail = (!self.slots.is_multiple_of(512)).then_some(self.slots / 512);
        let open: BTreeSet<u32> =
            self.model.keys().chain(&self.bad).map(|slot| slot / 512).chain(tail).collect();
        assert_eq!(
            usage.tables,
            open.len() as u32,
            "a table for each cluster in use, and no other"
        );
        assert_eq!(
            usage.clusters_free + usage.clusters_discard + usage.tables,
            self.slots.div_ceil(512)
        );
    }
}
