//! Models of the races that matter, every interleaving:
//! `RUSTFLAGS="--cfg loom" cargo test -p swaptide-core --release --test loom`. Clusters have 4
//! slots here, orders go from 0 to 2.
#![cfg(loom)]

mod interleavings;

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use swaptide_core::*;

const G: GroupId = GroupId(0);

fn device(slots: u32) -> SwapDevice {
    SwapDevice::new(SwapType::new(0).unwrap(), slots, 2, Kind::Solid)
}

/// Runs a model. Where everything is under one lock there are few interleavings; `at_least` tells
/// that the races are there.
fn model(at_least: usize, f: impl Fn() + Sync + Send + 'static) {
    let runs = interleavings::all_of(f);
    assert!(runs >= at_least, "{runs} interleavings: the model has no race");
}

fn alloc(d: &SwapDevice, cpu: u16, order: u8, folio: u32) -> Result<SwapOffset, AllocError> {
    d.alloc_folio(CpuId(cpu), Order::new(order).unwrap(), FolioId(folio), G)
}

/// A look-up while the cluster's last slot goes, its table is given back, and lent to another
/// cluster.
#[test]
fn lookup_against_table_free() {
    model(100, || {
        let d = Arc::new(device(8));
        let off = alloc(&d, 0, 2, 1).unwrap();
        let writer = {
            let d = d.clone();
            thread::spawn(move || {
                // The cluster empties and is filled again, and so is the other one.
                d.free(off, 4, Expect::Folio(FolioId(1))).unwrap();
                let first = alloc(&d, 0, 2, 2).unwrap();
                let second = alloc(&d, 1, 2, 3).unwrap();
                (first, second)
            })
        };
        let slot = off.plus(1);
        let seen = [d.lookup(slot), d.lookup(slot)];
        let (first, second) = writer.join().unwrap();
        let own = if first.cluster() == off.cluster() { 2 } else { 3 };
        assert_ne!(first.cluster(), second.cluster());
        for slot in seen {
            let known = [
                SlotContent::Free,
                SlotContent::Folio(FolioId(1)),
                SlotContent::Folio(FolioId(own)),
            ];
            assert!(known.contains(&slot), "{slot:?} was never in this slot");
        }
        assert!(!(seen[0] == known(own) && seen[1] == known(1)), "a look-up went back in time");
    });
}

/// A look-up in a cluster that was never used, while it is given out for the first time: it finds
/// nothing, or what comes there.
#[test]
fn lookup_against_the_first_table() {
    model(3, || {
        let d = Arc::new(device(8));
        let reader = {
            let d = d.clone();
            // Opening a table writes its first word.
            thread::spawn(move || [d.lookup(SwapOffset(0)), d.lookup(SwapOffset(0))])
        };
        assert_eq!(alloc(&d, 0, 2, 1), Ok(SwapOffset(0)));
        let seen = reader.join().unwrap();
        assert!(
            seen.iter().all(|slot| [SlotContent::Free, known(1)].contains(slot))
                && seen != [known(1), SlotContent::Free],
            "{seen:?}"
        );
    });
}

/// A folio that a look-up finds holds what was written before it entered.
#[test]
fn lookup_shows_what_came_before() {
    model(3, || {
        let d = Arc::new(device(4));
        let off = alloc(&d, 0, 0, 1).unwrap();
        d.folio_to_shadow(off, 1, FolioId(1), Shadow(9), ZeroMask::None).unwrap();
        let page = Arc::new(loom::sync::atomic::AtomicU32::new(0));
        let writer = {
            let (d, page) = (d.clone(), page.clone());
            thread::spawn(move || {
                page.store(7, loom::sync::atomic::Ordering::Relaxed);
                d.shadow_to_folio(off, 1, FolioId(2), None).unwrap();
            })
        };
        if d.lookup(off) == known(2) {
            assert_eq!(
                page.load(loom::sync::atomic::Ordering::Relaxed),
                7,
                "a folio without its data"
            );
        }
        writer.join().unwrap();
    });
}

fn known(folio: u32) -> SlotContent {
    SlotContent::Folio(FolioId(folio))
}

/// Two folios are swapped in over ranges that overlap: one wins whole, the other finds out.
#[test]
fn insert_against_overlapping_insert() {
    model(2, || {
        let d = Arc::new(device(4));
        let off = alloc(&d, 0, 2, 1).unwrap();
        d.folio_to_shadow(off, 4, FolioId(1), Shadow(9), ZeroMask::None).unwrap();
        let other = {
            let d = d.clone();
            thread::spawn(move || d.shadow_to_folio(off, 4, FolioId(2), None))
        };
        let mine = d.shadow_to_folio(off.plus(1), 2, FolioId(3), None);
        let theirs = other.join().unwrap();
        assert!(mine.is_ok() != theirs.is_ok());
        let lost = mine.err().or(theirs.err()).unwrap();
        assert!(lost.exists());
        let now: Vec<SlotContent> = (0..4).map(|i| d.lookup(off.plus(i))).collect();
        let shadow = SlotContent::Shadow { shadow: Shadow(9), zero: false };
        if theirs.is_ok() {
            assert_eq!(now, [known(2); 4]);
        } else {
            assert_eq!(now, [shadow, known(3), known(3), shadow]);
        }
    });
}

/// Two CPUs, one cluster: a run of order 1 and slots of order 0 that steal from it.
#[test]
fn alloc_with_stealing() {
    model(2, || {
        let d = Arc::new(device(4));
        let first = alloc(&d, 0, 1, 1).unwrap();
        let other = {
            let d = d.clone();
            thread::spawn(move || alloc(&d, 1, 0, 2))
        };
        let run = alloc(&d, 0, 1, 3);
        let one = other.join().unwrap();
        // The run may lose against the slot, or the slot against the run's reservation.
        assert!(run.is_ok() || one.is_ok());
        let mut taken = vec![first.0, first.0 + 1];
        taken.extend(run.iter().flat_map(|off| [off.0, off.0 + 1]));
        taken.extend(one.iter().map(|off| off.0));
        let (n, used) = (taken.len(), d.used());
        taken.sort_unstable();
        taken.dedup();
        assert_eq!((taken.len(), used as usize), (n, n));
        if let Ok(off) = one {
            assert_eq!(d.lookup(off), known(2));
        }
        if let Ok(off) = run {
            assert_eq!((d.lookup(off), d.lookup(off.plus(1))), (known(3), known(3)));
        }
    });
}

/// The last page table lets go of a slot while a swap-in puts a folio there: the slot is freed
/// once, or stays with the folio.
#[test]
fn put_to_zero_against_swap_in() {
    model(2, || {
        let d = Arc::new(device(4));
        let off = alloc(&d, 0, 0, 1).unwrap();
        d.folio_to_shadow(off, 1, FolioId(1), Shadow(9), ZeroMask::None).unwrap();
        let reader = {
            let d = d.clone();
            thread::spawn(move || d.shadow_to_folio(off, 1, FolioId(2), None))
        };
        let freed = d.put(off, 1).unwrap();
        match reader.join().unwrap() {
            Ok(()) => {
                assert_eq!((freed, d.lookup(off), d.count(off)), (0, known(2), 0));
                assert_eq!(d.folio_release(off, 1, FolioId(2)), Ok(1));
            }
            Err(gone) => assert!(gone.gone() && freed == 1),
        }
        assert_eq!((d.used(), d.usage().tables, d.lookup(off)), (0, 0, SlotContent::Free));
    });
}

/// A cluster empties while another CPU looks for space and a third thread discards: none gets a
/// slot that is being discarded.
#[test]
fn free_against_discard_and_alloc() {
    model(2, || {
        let d = Arc::new(device(4).with_discard(true));
        let off = alloc(&d, 0, 2, 1).unwrap();
        let discarder = {
            let d = d.clone();
            thread::spawn(move || {
                let Some(index) = d.next_discard() else { return };
                let mut used = 0;
                d.for_each_used(index, |_, _| used += 1);
                assert_eq!(used, 0, "a cluster being discarded is in no use");
                d.discard_done(index);
            })
        };
        d.free(off, 4, Expect::Any).unwrap();
        let again = alloc(&d, 0, 2, 2);
        discarder.join().unwrap();
        match again {
            Ok(off) => assert_eq!(d.lookup(off.plus(3)), known(2)),
            Err(e) => {
                assert_eq!(e, AllocError::NoRun);
                assert!(alloc(&d, 0, 2, 3).is_ok());
            }
        }
    });
}

/// A page whose user may be changed by the thread that locks it.
struct Page {
    locked: Mutex<bool>,
    unlocked: Condvar,
    at: std::sync::Mutex<SwapEntry>,
}

impl Page {
    fn new(at: SwapEntry) -> Arc<Page> {
        Arc::new(Page {
            locked: Mutex::new(false),
            unlocked: Condvar::new(),
            at: std::sync::Mutex::new(at),
        })
    }

    fn locked<R>(&self, f: impl FnOnce(&mut SwapEntry) -> R) -> R {
        let result = f(&mut self.at.try_lock().unwrap());
        *self.locked.lock().unwrap() = false;
        self.unlocked.notify_one();
        result
    }

    /// Does `f` with the page locked; `None`: another thread has it.
    fn try_with<R>(&self, f: impl FnOnce(&mut SwapEntry) -> R) -> Option<R> {
        if std::mem::replace(&mut *self.locked.lock().unwrap(), true) {
            return None;
        }
        Some(self.locked(f))
    }

    fn with<R>(&self, f: impl FnOnce(&mut SwapEntry) -> R) -> R {
        let mut locked = self.locked.lock().unwrap();
        while *locked {
            locked = self.unlocked.wait(locked).unwrap();
        }
        *locked = true;
        drop(locked);
        self.locked(f)
    }
}

/// Moves the page's slot if the page is not locked: its owner takes the page first and
/// the cluster then.
struct Pages(Arc<Page>);

impl Mover for Pages {
    fn switch(&mut self, slots: &Move<'_>) -> bool {
        let moves = |at: &mut SwapEntry| {
            let new = slots.each().find(|(from, ..)| from == at).map(|(_, to, _)| to);
            *at = new.unwrap_or(*at);
        };
        self.0.try_with(moves).is_some()
    }
}

/// Compaction moves a slot while its user swaps it in and frees it, and a look-up goes by.
#[test]
fn compaction_against_swap_in() {
    model(30, || {
        let d = Arc::new(device(8));
        let one = alloc(&d, 0, 0, 1).unwrap();
        let other = alloc(&d, 1, 0, 2).unwrap();
        assert_ne!(one.cluster(), other.cluster());
        for (off, folio) in [(one, 1), (other, 2)] {
            d.folio_to_shadow(off, 1, FolioId(folio), Shadow(folio), ZeroMask::None).unwrap();
        }
        let user = Page::new(SwapEntry::new(d.ty(), one));
        let mover = {
            let (d, user) = (d.clone(), user.clone());
            thread::spawn(move || d.compact(u32::MAX, false, &mut Pages(user)))
        };
        user.with(|at| {
            let off = at.offset();
            assert_eq!(d.lookup(off), SlotContent::Shadow { shadow: Shadow(1), zero: false });
            d.shadow_to_folio(off, 1, FolioId(3), None).unwrap();
            assert_eq!(d.free(off, 1, Expect::Folio(FolioId(3))), Ok(1));
        });
        let moved = mover.join().unwrap();
        assert!(
            moved.moved <= 1 && (d.used(), d.usage().tables) == (1, 1),
            "{moved:?} {:?}",
            d.usage()
        );
    });
}

/// A device is taken away while a slot of it loses its last user: the slot is freed once, wherever
/// it is.
#[test]
fn swapoff_against_the_last_put() {
    model(30, || {
        let space = SwapSpace::new();
        for n in 0..2 {
            space
                .add(
                    SwapDevice::new(SwapType::new(n).unwrap(), 4, 1, Kind::Solid),
                    1 - i32::from(n),
                )
                .unwrap();
        }
        let space = Arc::new(space);
        let at = space.alloc_folio(TypeMask::ALL, CpuId(0), Order::ZERO, FolioId(1), G).unwrap();
        let first = space.device(at.ty()).unwrap();
        first.folio_to_shadow(at.offset(), 1, FolioId(1), Shadow(1), ZeroMask::None).unwrap();
        // A neighbour that only moves: the cluster does not tell by being empty that the other is
        // gone.
        let neighbour =
            space.alloc_folio(TypeMask::ALL, CpuId(0), Order::ZERO, FolioId(2), G).unwrap();
        assert_eq!(neighbour.offset().cluster(), at.offset().cluster());
        let user = Page::new(at);
        let mover = {
            let (space, user) = (space.clone(), user.clone());
            thread::spawn(move || {
                space.swapoff(SwapType::new(0).unwrap(), TypeMask::ALL, &mut Pages(user))
            })
        };
        user.with(|at| assert_eq!(space.device(at.ty()).unwrap().put(at.offset(), 1), Ok(1)));
        let moved = mover.join().unwrap();
        assert!(moved == Ok(1) || moved == Ok(2), "{moved:?}");
        assert_eq!((space.used_of_capacity(TypeMask::ALL).0, first.used()), (1, 0));
        let other = space.device(SwapType::new(1).unwrap()).unwrap();
        assert_eq!(other.drain().map(|(_, info)| info.slot).collect::<Vec<_>>(), [known(2)]);
    });
}

/// Threads that go in against one that closes the gate: the cell tells of any access that overlaps
/// another. None waits, which a model cannot follow; what they do when they wait is this again.
#[test]
fn gate_inside_against_closed() {
    model(10, || {
        let gate = Arc::new(SharedGate::new(2));
        let cell = Arc::new(loom::cell::UnsafeCell::new(0u32));
        let look = |gate: &SharedGate, cell: &loom::cell::UnsafeCell<u32>, place| {
            let Some(_inside) = gate.try_enter(place) else { return 0 };
            // SAFETY: what the model is about: loom fails where it is not so.
            cell.with(|seen| unsafe { *seen })
        };
        let other = {
            let (gate, cell) = (gate.clone(), cell.clone());
            thread::spawn(move || look(&gate, &cell, 1))
        };
        let closer = {
            let (gate, cell) = (gate.clone(), cell.clone());
            thread::spawn(move || {
                let Some(_closed) = gate.try_close() else { return };
                // SAFETY: the models' own claim: loom fails if another thread has access.
                cell.with_mut(|cell| unsafe { *cell += 1 });
            })
        };
        assert!(look(&gate, &cell, 0) <= 1);
        assert!(other.join().unwrap() <= 1);
        closer.join().unwrap();
    });
}

/// Two threads that close the gate exclude each other, and a thread that goes in later sees what
/// both have done.
#[test]
fn gate_closed_against_closed() {
    model(3, || {
        let gate = Arc::new(SharedGate::new(1));
        let cell = Arc::new(loom::cell::UnsafeCell::new(0u32));
        let close = |gate: &SharedGate, cell: &loom::cell::UnsafeCell<u32>| {
            let Some(_closed) = gate.try_close() else { return 0 };
            // SAFETY: what the model is about: loom fails where it is not so.
            cell.with_mut(|cell| unsafe { *cell += 1 });
            1
        };
        let other = {
            let (gate, cell) = (gate.clone(), cell.clone());
            thread::spawn(move || close(&gate, &cell))
        };
        let closed = close(&gate, &cell) + other.join().unwrap();
        let inside = gate.try_enter(0);
        assert!(inside.is_some(), "it is open again");
        // SAFETY: the models' own claim: loom fails if another thread has access.
        assert_eq!(cell.with(|cell| unsafe { *cell }), closed);
    });
}
