//! Models of threads that work on one page next to each other, every interleaving: the engine's
//! protocols on the core's exchanges, with one page, and one lock for the memory lock.
//! `RUSTFLAGS="--cfg loom" cargo test -p swaptide-core --release --test loom_loads`.
//!
//! Each model is also run with one of its rules broken, and must fail then.
#![cfg(loom)]

mod interleavings;

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;
use swaptide_core::*;

const G: GroupId = GroupId(0);
const CPU: CpuId = CpuId(0);
/// The folio of a page on its way out, and those of two threads that bring pages in.
const FRAME: FolioId = FolioId(1);
const HANDLER: FolioId = FolioId(10);
const SERVER: FolioId = FolioId(11);
/// What the page holds, what the program makes of it later, and what another page holds.
const CONTENT: u32 = 7;
const CHANGED: u32 = 8;
const OTHER_PAGE: u32 = 9;

/// A rule that a model is run without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Broken {
    Nothing,
    /// A thread that brings a page in puts no folio into its slot.
    NoFolio,
    /// A change of mappings is read while pages are put in place.
    NoGate,
    /// A page that is given up takes its data along, even while a thread reads it.
    DropsUnderLoad,
    /// Write-back moves a slot from under a thread that brings its page in.
    MovesUnderLoad,
    /// Write-back does not look whether the page has changed.
    NoEpoch,
    /// The end of a batch does not see that the program has a page back.
    NoCancel,
    /// The handler works alone without having waited for the loads of others.
    NoWait,
}

/// Where the page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    Present,
    Swapped(SwapOffset),
    Empty,
}

/// What the memory lock guards.
struct Mm {
    word: Word,
    epoch: u32,
    /// The program has the page of the frame back.
    is_cancelled: bool,
    /// The handler works alone.
    is_alone: bool,
    loads: u32,
}

impl Mm {
    fn set(&mut self, word: Word) {
        self.word = word;
        self.epoch += 1;
    }
}

/// The engine in small.
struct Engine {
    broken: Broken,
    slots: SwapDevice,
    /// What is stored for each slot; the store has a lock of its own.
    stored: [Mutex<Option<u32>>; 2],
    gate: SharedGate,
    mm: Mutex<Mm>,
    /// The page in the program, and a staging frame: loom fails where accesses overlap.
    page: UnsafeCell<u32>,
    frame: UnsafeCell<u32>,
}

/// What a load came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Load {
    Filled,
    /// Another thread brings the page in.
    Exists,
    /// The page is not what it was.
    Stale,
    /// A thread would wait here.
    Waits,
}

impl Engine {
    /// The page is out, in a slot.
    fn swapped_out(broken: Broken) -> (Arc<Engine>, SwapOffset) {
        let engine = Engine::resident(broken);
        let off = engine.store_out(CONTENT);
        engine.mm.lock().unwrap().set(Word::Swapped(off));
        (engine, off)
    }

    /// The page is in the program.
    fn resident(broken: Broken) -> Arc<Engine> {
        Arc::new(Engine {
            broken,
            slots: SwapDevice::new(SwapType::new(0).unwrap(), 2, 1, Kind::Solid),
            stored: [Mutex::new(None), Mutex::new(None)],
            gate: SharedGate::new(2),
            mm: Mutex::new(Mm {
                word: Word::Present,
                epoch: 0,
                is_cancelled: false,
                is_alone: false,
                loads: 0,
            }),
            page: UnsafeCell::new(CONTENT),
            frame: UnsafeCell::new(0),
        })
    }

    fn alloc(&self) -> SwapOffset {
        self.slots.alloc_folio(CPU, Order::ZERO, FRAME, G).expect("two slots are enough")
    }

    /// Stores a page in a slot, which has a shadow then.
    fn store_out(&self, content: u32) -> SwapOffset {
        let off = self.alloc();
        self.store(off, content);
        self.slots.folio_to_shadow(off, 1, FRAME, Shadow(3), ZeroMask::None).unwrap();
        off
    }

    fn store(&self, off: SwapOffset, content: u32) {
        let before = self.stored[off.0 as usize].lock().unwrap().replace(content);
        assert_eq!(before, None, "two pages in one slot");
    }

    fn stored(&self, off: SwapOffset) -> Option<u32> {
        *self.stored[off.0 as usize].lock().unwrap()
    }

    /// Drops a slot with its data.
    fn drop_slot(&self, off: SwapOffset, expect: Expect) {
        let held = self.stored[off.0 as usize].lock().unwrap().take();
        assert!(held.is_some(), "a slot in use held nothing");
        assert_eq!(self.slots.free(off, 1, expect), Ok(1), "a slot was not what it must be");
    }

    fn fill(&self, content: u32) {
        // SAFETY: what the models are about: loom fails where it is not so.
        self.page.with_mut(|page| unsafe { *page = content });
    }

    /// A thread brings the page in.
    fn load(&self, folio: FolioId) -> Load {
        let (off, shadow) = {
            let mut mm = self.mm.lock().unwrap();
            let Word::Swapped(off) = mm.word else { return Load::Stale };
            if mm.is_alone {
                return Load::Waits;
            }
            let mut shadow = [Shadow(0)];
            if self.broken != Broken::NoFolio {
                match self.slots.shadow_to_folio(off, 1, folio, Some(&mut shadow)) {
                    Ok(()) => {}
                    Err(mismatch) => {
                        assert!(mismatch.exists(), "{mismatch}");
                        return Load::Exists;
                    }
                }
            }
            mm.loads += 1;
            (off, shadow[0])
        };
        let content = self.stored(off);
        let inside = self.gate.try_enter(usize::from(folio == SERVER));
        let mut mm = self.mm.lock().unwrap();
        let mut load = Load::Stale;
        if inside.is_none() || mm.is_alone {
            load = Load::Waits;
        } else if mm.word == Word::Swapped(off) {
            assert_eq!(content, Some(CONTENT), "what was loaded is not the page");
            drop(mm);
            self.fill(CONTENT);
            mm = self.mm.lock().unwrap();
            mm.set(Word::Present);
            load = Load::Filled;
        }
        mm.loads -= 1;
        if self.broken == Broken::NoFolio {
            if load == Load::Filled {
                self.drop_slot(off, Expect::Shadow);
            }
        } else if load == Load::Filled || self.slots.count(off) == 0 {
            self.drop_slot(off, Expect::Folio(folio));
        } else {
            self.slots.folio_to_shadow(off, 1, folio, shadow, ZeroMask::Keep).unwrap();
        }
        load
    }

    /// The program gives the page up, which is read with the gate closed. False where a thread
    /// would wait.
    fn give_up(&self) -> bool {
        let closed = self.gate.try_close();
        if closed.is_none() && self.broken != Broken::NoGate {
            return false;
        }
        let mut mm = self.mm.lock().unwrap();
        if let Word::Swapped(off) = mm.word {
            let is_loaded = matches!(self.slots.lookup(off), SlotContent::Folio(_));
            if is_loaded && self.broken != Broken::DropsUnderLoad {
                assert_eq!(self.slots.put(off, 1), Ok(0));
            } else {
                self.drop_slot(off, Expect::Any);
            }
        }
        mm.set(Word::Empty);
        true
    }

    /// Write-back moves the page to another slot.
    fn write_back(&self) -> bool {
        let (old, epoch) = {
            let mm = self.mm.lock().unwrap();
            let Word::Swapped(old) = mm.word else { return false };
            if !matches!(self.slots.lookup(old), SlotContent::Shadow { .. }) {
                return false;
            }
            (old, mm.epoch)
        };
        let Some(copy) = self.stored(old) else { return false };
        let Ok(new) = self.slots.alloc_folio(CPU, Order::ZERO, FRAME, G) else { return false };
        self.store(new, copy);
        let mut mm = self.mm.lock().unwrap();
        self.slots.folio_to_shadow(new, 1, FRAME, Shadow(3), ZeroMask::None).unwrap();
        let is_unchanged = mm.epoch == epoch || self.broken == Broken::NoEpoch;
        let is_loaded = !matches!(self.slots.lookup(old), SlotContent::Shadow { .. });
        let moves = mm.word == Word::Swapped(old)
            && is_unchanged
            && (!is_loaded || self.broken == Broken::MovesUnderLoad);
        if moves {
            mm.set(Word::Swapped(new));
            self.drop_slot(old, Expect::Any);
        } else {
            self.drop_slot(new, Expect::Shadow);
        }
        moves
    }

    /// The page goes out: from the frame, to which it was moved, to a slot.
    fn move_out(&self) {
        let off = {
            let mut mm = self.mm.lock().unwrap();
            let off = self.alloc();
            // SAFETY: the models' own claim: loom fails if another thread has access.
            let content = self.page.with_mut(|page| unsafe { std::mem::take(&mut *page) });
            // SAFETY: the models' own claim: loom fails if another thread has access.
            self.frame.with_mut(|frame| unsafe { *frame = content });
            mm.set(Word::Swapped(off));
            off
        };
        // SAFETY: the models' own claim: loom fails if another thread has access.
        let content = self.frame.with(|frame| unsafe { *frame });
        self.store(off, content);
        let mm = self.mm.lock().unwrap();
        if mm.is_cancelled && self.broken != Broken::NoCancel {
            self.drop_slot(off, Expect::Folio(FRAME));
        } else {
            self.slots.folio_to_shadow(off, 1, FRAME, Shadow(3), ZeroMask::None).unwrap();
        }
        // SAFETY: the models' own claim: loom fails if another thread has access.
        self.frame.with_mut(|frame| unsafe { *frame = 0 });
    }

    /// A fault on the page, which is in the swap cache as a frame, in a slot, or there.
    fn fault(&self, folio: FolioId) -> Load {
        {
            let mut mm = self.mm.lock().unwrap();
            let Word::Swapped(off) = mm.word else { return Load::Stale };
            if self.slots.lookup(off) == SlotContent::Folio(FRAME) {
                // SAFETY: the models' own claim: loom fails if another thread has access.
                let content = self.frame.with(|frame| unsafe { *frame });
                self.fill(content);
                mm.is_cancelled = true;
                mm.set(Word::Present);
                return Load::Filled;
            }
        }
        self.load(folio)
    }

    /// What the program finds in the page, wherever it is, and how many slots are in use.
    fn at_the_end(&self) -> (Option<u32>, u32) {
        let content = match self.mm.lock().unwrap().word {
            // SAFETY: all other threads have ended.
            Word::Present => Some(self.page.with(|page| unsafe { *page })),
            Word::Swapped(off) => {
                assert!(matches!(self.slots.lookup(off), SlotContent::Shadow { .. }));
                self.stored(off)
            }
            Word::Empty => None,
        };
        let held = self.stored.iter().filter(|data| data.lock().unwrap().is_some()).count();
        assert_eq!(held as u32, self.slots.used(), "slots and what is stored differ");
        (content, self.slots.used())
    }
}

/// Runs a model as it is, where it must hold in `at_least` interleavings or more, and with each
/// of these rules broken, where it must fail.
fn model(at_least: usize, rules: &[Broken], run: impl Fn(Broken) + Copy + Send + Sync + 'static) {
    let check = move |broken| interleavings::all_of(move || run(broken));
    let runs = check(Broken::Nothing);
    assert!(runs >= at_least, "{runs} interleavings: the model has no race");
    for &rule in rules {
        let broken = catch_unwind(AssertUnwindSafe(|| check(rule)));
        let Err(why) = broken else { panic!("the model holds without the rule: {rule:?}") };
        let why = why.downcast_ref::<String>().map_or("", String::as_str);
        assert!(!why.contains("exceeded"), "{rule:?}: a model without an end is no failure: {why}");
    }
}

/// Runs `other` in a thread next to `own`, and gives what both came to.
fn race<A: 'static, B>(
    engine: &Arc<Engine>,
    other: impl FnOnce(&Engine) -> A + 'static,
    own: impl FnOnce(&Engine) -> B,
) -> (A, B) {
    let other = {
        let engine = engine.clone();
        thread::spawn(move || other(&engine))
    };
    let own = own(engine);
    (other.join().unwrap(), own)
}

/// Two threads serve faults on one page: one brings it in, the other forgets its fault.
#[test]
fn two_servers_on_one_page() {
    model(10, &[Broken::NoFolio], |broken| {
        let (engine, _) = Engine::swapped_out(broken);
        let (theirs, ours) = race(&engine, |e| e.load(SERVER), |e| e.load(HANDLER));
        let filled = [ours, theirs].iter().filter(|load| **load == Load::Filled).count();
        assert_eq!(filled, 1, "{ours:?} {theirs:?}");
        assert_eq!(engine.at_the_end(), (Some(CONTENT), 0));
    });
}

/// The program gives a page up, as by a remap, while a server brings it in; its slot is another
/// page's then.
#[test]
fn server_against_a_change_of_mappings() {
    model(10, &[Broken::DropsUnderLoad, Broken::NoGate], |broken| {
        let (engine, _) = Engine::swapped_out(broken);
        let (load, others) =
            race(&engine, |e| e.load(SERVER), |e| e.give_up().then(|| e.store_out(OTHER_PAGE)));
        assert_ne!(load, Load::Exists);
        match others {
            Some(slot) => {
                assert_eq!(engine.stored(slot), Some(OTHER_PAGE));
                assert_eq!(engine.at_the_end(), (None, 1));
            }
            None => {
                let is_out = u32::from(load != Load::Filled);
                assert_eq!(engine.at_the_end(), (Some(CONTENT), is_out));
            }
        }
    });
}

/// Write-back moves a page's slot while a server brings the page in.
#[test]
fn server_against_write_back() {
    model(10, &[Broken::MovesUnderLoad], |broken| {
        let (engine, _) = Engine::swapped_out(broken);
        let (moved, load) = race(&engine, |e| e.write_back(), |e| e.load(HANDLER));
        assert_eq!(load, Load::Filled, "moved: {moved}");
        assert_eq!(engine.at_the_end(), (Some(CONTENT), 0));
    });
}

/// While write-back copies a page it comes in, is changed, and goes out again to the same slot.
#[test]
fn write_back_against_a_page_that_returns() {
    model(10, &[Broken::NoEpoch], |broken| {
        let (engine, _) = Engine::swapped_out(broken);
        race(
            &engine,
            |e| e.write_back(),
            |e| {
                assert_eq!(e.load(HANDLER), Load::Filled);
                let mut mm = e.mm.lock().unwrap();
                let again = e.store_out(CHANGED);
                mm.set(Word::Swapped(again));
            },
        );
        assert_eq!(engine.at_the_end(), (Some(CHANGED), 1));
    });
}

/// A page goes out while a server has a fault on it.
#[test]
fn server_against_reclaim() {
    model(5, &[Broken::NoCancel], |broken| {
        let engine = Engine::resident(broken);
        let ((), load) = race(&engine, |e| e.move_out(), |e| e.fault(HANDLER));
        assert!(load == Load::Filled || load == Load::Stale, "{load:?}");
        let is_back = load == Load::Filled;
        assert_eq!(engine.at_the_end(), (Some(CONTENT), u32::from(!is_back)));
    });
}

/// The handler has a fork before it: it works alone, and no slot or page changes under it.
#[test]
fn server_against_fork() {
    model(10, &[Broken::NoWait], |broken| {
        let (engine, off) = Engine::swapped_out(broken);
        let (load, forked) = race(
            &engine,
            |e| e.load(SERVER),
            |e| {
                {
                    let Some(_closed) = e.gate.try_close() else { return false };
                    e.mm.lock().unwrap().is_alone = true;
                }
                let loads = e.mm.lock().unwrap().loads;
                if loads > 0 && broken != Broken::NoWait {
                    return false;
                }
                // What the child gets: no thread brings anything in.
                let slot = e.slots.lookup(off);
                assert!(!matches!(slot, SlotContent::Folio(_)), "a fork amid a load");
                // SAFETY: the models' own claim: loom fails if another thread has access.
                e.page.with(|page| unsafe { *page });
                true
            },
        );
        assert!(load != Load::Exists);
        if forked && load == Load::Waits {
            assert_eq!(engine.mm.lock().unwrap().word, Word::Swapped(off));
        }
        let (content, _) = engine.at_the_end();
        assert_eq!(content, Some(CONTENT));
    });
}
