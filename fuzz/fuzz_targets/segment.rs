//! The supervisor's side of a segment into which a hostile process has written: it neither ends nor
//! hangs, and gives out no extent that is not there. Each input ends with looks of the
//! controller, which reads all that the supervisor reads: areas, tree, budget, `--strict`, groups,
//! totals, and what `ctl` and `top` show. The controller has one run, whose root this process is.
//! Then the store of shared memory, which is in the supervisor too, puts pages away and brings them
//! back, areas are removed, and a daemon starts again with the segment.
#![no_main]

use std::collections::BTreeSet;
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use swaptide_fuzz::{Bytes, empty_segment, page_of};
use swaptide_host::cgroup::psi::TimeShare;
use swaptide_host::cgroup::tree::{GroupPath, GroupTree, GroupUsage};
use swaptide_host::daemon::segment::SegmentId;
use swaptide_host::daemon::state::SavedState;
use swaptide_host::memctl::controller::{self, ControllerRequest, ManagedRun, MemoryController};
use swaptide_host::swap::areas::{AreaOpener, Areas};
use swaptide_ipc::{
    AreaId, AreaMask, ExtentId, GroupIndex, Header, MAX_AREAS, MAX_EXTENTS, MAX_GROUPS, NewArea,
    ProcSlot, Segment, SlotIndex,
};
use swaptide_shared::region::RegionPage;
use swaptide_shared::store::{PutOutcome, Store, compressor};
use swaptide_store::codec::Unpacker;
use swaptide_store::{PAGE_SIZE, Slot};
use swaptide_sys::OwnedFd;
use swaptide_sys::thread::Nanos;

/// Writes a word where any process of the tree can.
fn scribble(segment: &Segment, bytes: &mut Bytes<'_>) -> Option<()> {
    let (place, at, value) = (bytes.byte()?, usize::from(bytes.short()?), bytes.word()?);
    let groups = offset_of!(Segment, groups);
    let (start, len) = match place % 4 {
        0 => (0, size_of::<Header>()),
        // The first slots, to the end of what is not the bits of extents, and those.
        1 => (offset_of!(Segment, procs), 4 * size_of::<ProcSlot>()),
        // The groups, the first extents of each, and all.
        2 if place / 4 % 4 < 2 => (groups, 64 * MAX_GROUPS),
        2 if place / 4 % 4 == 2 => {
            (groups + 64 * MAX_GROUPS + 16 + at / 1024 * 2 * MAX_EXTENTS, 4096)
        }
        2 => (groups + at * 128 % (Segment::BYTES - groups - 4096), 4096),
        _ => (offset_of!(Segment, extent_refs), 4096),
    };
    let offset = start + at * 4 % len / 4 * 4;
    assert!(offset + 4 <= Segment::BYTES);
    // SAFETY: the word lies within the segment, is aligned, and a segment is of atomics only.
    let word = unsafe { &*std::ptr::from_ref(segment).cast::<AtomicU32>().byte_add(offset) };
    word.store(value, SeqCst);
    Some(())
}

/// Two looks of a controller at the segment, with words that change in between, and everything that
/// it can be asked.
fn keep(
    segment: &'static Segment,
    groups: GroupTree,
    areas: &Arc<Areas>,
    bytes: &mut Bytes<'_>,
) -> SavedState {
    let me = std::process::id();
    segment.claim(me, 0);
    let mut thread = MemoryController::new(segment, Arc::clone(areas), groups, 64 << 20);
    let run = ManagedRun {
        root: me,
        launcher: me,
        uid: 0,
        program: String::new(),
        started: 0.0,
        group: None,
        max: None,
        strict: true,
        stall: Default::default(),
        attached: false,
        recorded: true,
        container: None,
    };
    thread.add_run(run);
    let (controller, requests) = mpsc::channel();
    let thread = std::thread::spawn(move || thread.run(requests));
    let mut saved = None;
    for _ in 0..2 {
        let looked = controller::ask(&controller, move |controller| {
            let (view, totals) = (controller.view(me), controller.final_totals(me));
            assert!(
                view.processes.iter().all(|process| process.pid == me),
                "only the kernel's word makes members"
            );
            assert!(!totals.strict_kill, "this process is small");
            let _ = (
                totals.pages_out(),
                totals.pages_in(),
                totals.fault_times(),
                serde_json::to_string(&view).map(drop),
            );
            let _ = (
                serde_json::to_string(&totals).map(drop),
                controller.group_views(&GroupPath::root()).map(|views| views.len()),
            );
            let _ = (
                controller.areas().view().len(),
                controller.preloading(GroupIndex::ROOT, true),
                controller.run_of(me).is_some(),
            );
            SavedState::of(controller, 0, 0)
        });
        saved = looked;
        assert!(saved.is_some(), "the controller has ended, or takes too long");
        for _ in 0..8 {
            let _ = scribble(segment, bytes);
        }
    }
    let _ = controller.send(ControllerRequest::Stop);
    thread.join().expect("the controller");
    saved.expect("two looks")
}

/// What the pager of shared memory reads of the segment: it is a process of the run, with a slot.
fn put_away(segment: &'static Segment, areas: &Arc<Areas>, limit: u64) {
    let Some(index) = segment.claim(std::process::id(), 0) else { return };
    let areas = Arc::clone(areas);
    let open = Arc::new(move |id| areas.open(id));
    let store = Store::new(segment, index, open, 0).expect("address space");
    let (mut compressor, mut unpacker) = (compressor(segment), Unpacker::new());
    let percent = segment.header.pool.percent.load(SeqCst);
    store.set_pool_limit(limit, percent.into());
    let pages: Vec<_> = (0..24).map(page_of).collect();
    let mut states = Vec::new();
    for (slot, page) in (0..).map(Slot).zip(&pages) {
        let state = match store.put(slot, page, &mut compressor) {
            PutOutcome::In(state) => Some(state),
            _ if store.write(&[(slot, page)]) => Some(RegionPage::Area),
            _ => None,
        };
        states.push(state);
    }
    let of_pool = |slot: &Slot| states[slot.0 as usize] == Some(RegionPage::Pool);
    let slots: Vec<Slot> = (0..8).map(Slot).filter(of_pool).collect();
    if store.has_file() && store.pool_excess() > 0 {
        store.copy_back(&slots, &mut unpacker);
    }
    store.follow_areas();
    for (slot, state) in (0..).map(Slot).zip(states) {
        let Some(state) = state else { continue };
        let mut page = [0; PAGE_SIZE];
        let unloaded = store.load(&mut [(slot, state, &mut page)], &mut unpacker);
        let is_in = unloaded.failed.is_empty() && unloaded.short.is_empty();
        assert!(!is_in || page == *pages[slot.0 as usize], "a wrong page came back");
        store.free(slot, state);
    }
}

/// A daemon that starts again with the segment, and an area whose server is away.
fn start_again(segment: &'static Segment, file: &OwnedFd, mut saved: SavedState) {
    let away = r#"{"id":2,"name":"away","kind":"nbd","place":"","extents":4,"base_bytes":0,
        "path":"nbd+unix:///x?socket=/nonexistent","priority":0,"direct_io":false,"plain":false}"#;
    saved.areas.push(serde_json::from_str(away).expect("an area"));
    let areas = Arc::new(Areas::new(segment));
    let mut groups = GroupTree::new(segment, 1 << 34);
    saved.restore(&areas, &mut groups, segment);
    let mut controller = MemoryController::new(segment, Arc::clone(&areas), groups, 64 << 20);
    let id = SegmentId::of(file).expect("its number");
    saved.restore_runs(&mut controller, segment, id);
    areas.measure();
    let _ = (areas.view().len(), controller.totals(std::process::id()).pages_out());
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let (segment, file) = empty_segment();
    let areas = Arc::new(Areas::new(segment));
    let mut groups = GroupTree::new(segment, 1 << 34);
    let mut scribbled = false;
    // Extents in use, as long as nothing was scribbled.
    let mut leased: BTreeSet<(u32, u32)> = BTreeSet::new();
    // Of those, and of those that were: what a server has not answered.
    let mut doubtful: BTreeSet<u32> = BTreeSet::new();
    // An audit counts millions of words: only in histories that begin with one.
    let mut audits = usize::from(data.first() != Some(&11));
    for number in 0..200 {
        let Some(what) = bytes.byte() else { break };
        let slot = SlotIndex(u32::from(what >> 4) % 4);
        match what % 16 {
            0..=2 => {
                if scribble(segment, &mut bytes).is_none() {
                    break;
                }
                scribbled = true;
            }
            3 => {
                if let Some((_, extent)) = leased.iter().find(|(owner, _)| *owner == slot.0) {
                    segment.doubt_extent(ExtentId(*extent));
                    doubtful.insert(*extent);
                    if bytes.byte().is_some_and(|byte| byte % 2 == 0) {
                        segment.clear_doubt(ExtentId(*extent));
                        doubtful.remove(extent);
                    }
                }
            }
            4 => drop(segment.add_area(NewArea::of_file(i32::from(what >> 4), 1 + number % 5))),
            5 => {
                // A process that comes again has executed another program, and holds nothing any
                // more.
                if let Some(index) = segment.claim(100 + u32::from(what >> 4), 0) {
                    leased.retain(|(owner, _)| *owner != index.0);
                }
            }
            6 => {
                segment.release(slot, |extent| {
                    assert!((extent.0 as usize) < MAX_EXTENTS);
                    assert!(scribbled || leased.contains(&(slot.0, extent.0)));
                });
                leased.retain(|(owner, _)| *owner != slot.0);
            }
            // Only a process with a slot leases, unless something was scribbled.
            7 | 8 if scribbled || segment.claimed().any(|(index, _)| index == slot) => {
                if let Some(extent) = segment
                    .lease_charged(slot)
                    .or_else(|| segment.lease_extent(slot, AreaMask::ALL))
                {
                    assert!((extent.0 as usize) < MAX_EXTENTS);
                    assert!(
                        scribbled || leased.iter().all(|(_, of)| *of != extent.0),
                        "{extent:?} is given out twice"
                    );
                    assert!(scribbled || !doubtful.contains(&extent.0), "{extent:?} is in doubt");
                    leased.insert((slot.0, extent.0));
                    let _ = (segment.place_of(extent), segment.sole_holder(extent));
                }
            }
            9 => {
                if let Some((_, extent)) =
                    leased.iter().find(|(owner, _)| *owner == slot.0).copied()
                {
                    segment.release_charged(slot, slot, ExtentId(extent));
                    leased.remove(&(slot.0, extent));
                }
            }
            10 => {
                let id = AreaId(what >> 4);
                if usize::from(id.0) < MAX_AREAS {
                    segment.close_area(id);
                    for extent in segment.extents_in_doubt(id) {
                        assert!((extent.0 as usize) < MAX_EXTENTS);
                        segment.clear_stale_doubt(extent);
                        doubtful.remove(&extent.0);
                    }
                    let _ = (segment.holders(id), segment.area(id).free());
                    if segment.remove_area(id) {
                        doubtful.clear();
                    }
                }
            }
            11 if audits < 1 => {
                audits += 1;
                segment.demand_audit();
                segment.audit(|extent| assert!((extent.0 as usize) < MAX_EXTENTS));
            }
            12 => {
                if let Ok(path) =
                    GroupPath::parse(["/a", "/a/b", "/c", "/"][usize::from(what >> 4) % 4])
                    && let Ok(index) = groups.ensure(&path, 0)
                {
                    let _ = groups.set(index, [("swap.max", "4M")]);
                    segment.slot(slot).control.group_wanted.store(index.0, SeqCst);
                }
            }
            13 => segment.regroup(slot),
            14 => {
                let claimed: Vec<_> = segment.claimed().collect();
                assert!(claimed.len() <= segment.procs.len());
                for index in (0..MAX_GROUPS as u32).map(GroupIndex) {
                    assert!(segment.ancestry(index).count() <= MAX_GROUPS);
                }
                for (index, _) in
                    groups.iter().map(|(index, group)| (index, group.owner)).collect::<Vec<_>>()
                {
                    let _ = (groups.view(index), groups.usage(index), groups.swap_bytes(index));
                }
            }
            _ => {
                groups.publish();
                let elapsed = Duration::from_millis(what.into());
                let usage = |slot: &ProcSlot| {
                    let stalled =
                        TimeShare::of(slot.stalled_us(Nanos(u64::from(what) << 40)), elapsed);
                    assert!(stalled.of_bytes(1 << 40) <= 1 << 40, "more than all of the time");
                    GroupUsage { stalled, ..GroupUsage::default() }
                };
                let own = segment
                    .claimed()
                    .map(|(_, slot)| (GroupIndex(slot.group.load(SeqCst)), usage(slot)))
                    .collect();
                groups.account(&own, elapsed, |_| false);
            }
        }
        if leased.len() > 64 {
            break;
        }
        if what % 16 == 6 {
            leased.retain(|(owner, _)| *owner != slot.0);
        }
    }
    // Areas with something open behind them, as the supervisor has them.
    for id in (0..MAX_AREAS as u8).map(AreaId) {
        if id.0 < 2 {
            let device = swaptide_host::swap::spec::parse("file:/dev/shm:16M").expect("a device");
            if let Ok(backing) = swaptide_host::swap::spec::open_backing(&device, 1 << 30) {
                areas.restore(id, backing);
            }
        }
        let _ = (areas.may_block(id), areas.open(id).is_ok());
    }
    if scribbled {
        let saved = keep(segment, groups, &areas, &mut bytes);
        put_away(segment, &areas, u64::from(data.len() as u8) << 56 | 16 << 20);
        for id in (0..MAX_AREAS as u8).map(AreaId) {
            // Of one that is used its pages would be waited for.
            if segment.area(id).used() == 0 {
                let _ = areas.remove(&id.0.to_string(), |_| ());
            }
        }
        start_again(segment, file, saved);
    }
});
