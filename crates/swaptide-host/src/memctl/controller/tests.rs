use super::*;
use crate::memctl::policy::Standing;
use crate::swap::areas::AreaOpener;
use crate::testing::segment;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command, Stdio};
use swaptide_ipc::{AreaId, AreaMask};
use swaptide_sys::process::proc_info;
use swaptide_sys::thread::now;

fn no_areas(segment: &'static Segment) -> Arc<Areas> {
    Arc::new(Areas::new(segment))
}

/// One that keeps the child and its descendants: they are this process's.
fn controller(
    child: &Child,
    segment: &'static Segment,
    areas: Arc<Areas>,
    budget: u64,
    strict: bool,
) -> MemoryController {
    let mut controller =
        MemoryController::new(segment, areas, GroupTree::new(segment, budget), budget);
    let (root, program) = (child.id(), "sleep".to_owned());
    controller.add_run(ManagedRun {
        root,
        launcher: root,
        uid: 0,
        program,
        started: 0.0,
        group: None,
        max: None,
        strict,
        stall: Default::default(),
        attached: false,
        container: None,
        recorded: true,
    });
    controller
}

fn sleeper() -> Child {
    Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().expect("sleep")
}

fn end(mut child: Child) {
    child.kill().expect("kill");
    child.wait().expect("wait");
}

#[test]
fn a_budget_is_advised_only_where_the_user_has_chosen_one() {
    let (segment, child) = (segment(), sleeper());
    let controller = controller(&child, segment, no_areas(segment), 64 << 20, false);
    let of_daemon = controller.runs().next().expect("the run").clone();
    let with_ram = ManagedRun { max: Some(7 << 20), ..of_daemon.clone() };
    let alone = ManagedRun { root: std::process::id(), ..of_daemon.clone() };
    let budgets = [&of_daemon, &with_ram, &alone].map(|run| controller.chosen_budget(run));
    assert_eq!(budgets, [None, Some(7 << 20), Some(64 << 20)]);
    end(child);
}

#[test]
fn a_process_that_dies_leaves_its_counters_and_no_extent() {
    let segment = segment();
    let areas = no_areas(segment);
    let device = crate::swap::spec::parse("file:/var/tmp:16M").expect("a device");
    areas.add(crate::swap::spec::open_backing(&device, 1 << 30).expect("a file")).expect("an area");
    let file = File::from(areas.open(AreaId(0)).expect("open"));
    let child = sleeper();
    let index = segment.claim(child.id(), 0).expect("slot");
    segment.lease_extent(index, AreaMask::ALL).expect("extent");
    let page = swaptide_sys::mem::Mapping::reserve(65536).expect("pages");
    // SAFETY: the mapping is so long and readable, and nothing else refers to it.
    file.write_all_at(unsafe { std::slice::from_raw_parts(page.as_ptr(), 65536) }, 0)
        .expect("write");
    file.sync_all().expect("sync");
    assert!(file.metadata().expect("metadata").blocks() > 0);
    segment.slot(index).count(Counter::Pswpout, 16);
    let root = child.id();
    let mut controller = controller(&child, segment, areas, 64 << 20, false);
    controller.tick();
    assert_eq!(controller.totals(root).get(Counter::Pswpout), 16);
    assert_eq!(segment.extents_used(), 1);
    end(child);
    controller.tick();
    assert_eq!(controller.totals(root).get(Counter::Pswpout), 16, "the dead are counted once");
    assert_eq!(segment.extents_used(), 0);
    assert_eq!(file.metadata().expect("metadata").blocks(), 0, "the space is free again");
    assert_eq!(segment.claimed().count(), 0);
}

#[test]
fn a_run_is_recorded_with_what_its_dead_have_counted() {
    let segment = segment();
    let child = sleeper();
    let root = child.id();
    let index = segment.claim(root, 0).expect("slot");
    let mut controller = controller(&child, segment, no_areas(segment), 64 << 20, false);
    let slot = segment.slot(index);
    slot.count(Counter::Pgmajfault, 5);
    slot.count(Counter::Zswpout, 70);
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(12));
        controller.tick();
    }
    slot.count(Counter::Pgmajfault, 2);
    end(child);
    controller.tick();
    let totals = controller.final_totals(root);
    let series = totals.series.as_ref().expect("recorded");
    let (begin, points) = series.points().expect("points");
    assert!(begin > 1_000_000, "it began in 1970: {begin}");
    assert!(points.len() >= 3, "{points:?}");
    assert_eq!(series.faults.iter().sum::<u64>(), 7, "{series:?}");
    assert_eq!(series.pages_out.iter().sum::<u64>(), totals.pages_out());
    assert_eq!(series.resident_bytes.iter().max(), Some(&totals.peak_resident));
    assert!(series.budget_bytes.iter().all(|budget| *budget == 64 << 20), "{series:?}");
    assert_eq!(series.processes.iter().max(), Some(&1));
    assert!(controller.totals(root).series.is_none(), "before the end nothing needs it");
}

#[test]
fn a_group_that_gets_the_number_of_a_frozen_one_is_not_frozen() {
    let segment = segment();
    let child = sleeper();
    let mut controller = controller(&child, segment, no_areas(segment), 64 << 20, false);
    let path = |text: &str| GroupPath::parse(text).expect("a path");
    let first = controller.groups().ensure(&path("/first"), 0).expect("a group");
    controller.freeze(first, true);
    controller.move_process(child.id(), first);
    controller.tick();
    controller.tree.admit(child.id());
    controller.remove_group(&path("/first")).expect("no process is in it");
    let second = controller.groups().ensure(&path("/second"), 0).expect("a group");
    assert_eq!(second, first, "the number is used again");
    assert_eq!(controller.frozen().count(), 0);
    end(child);
}

#[test]
fn a_group_with_processes_that_are_not_managed_stays() {
    let segment = segment();
    let mut child = Command::new("sh")
        .args(["-c", "sleep 600 & echo; wait"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sh");
    std::io::Read::read_exact(&mut child.stdout.take().expect("a pipe"), &mut [0]).expect("a line");
    let mut controller = controller(&child, segment, no_areas(segment), 64 << 20, false);
    let path = GroupPath::parse("/group").expect("a path");
    let group = controller.groups().ensure(&path, 0).expect("a group");
    controller.tick();
    let inside = controller.tree.pids().next().expect("the child of the root");
    controller.move_process(inside, group);
    controller.tick();
    assert!(matches!(controller.remove_group(&path), Err(GroupError::Busy(..))));
    controller.tree.kill_all(child.id());
    let began = Instant::now();
    while controller.remove_group(&path).is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "it has ended");
        std::thread::sleep(Duration::from_millis(10));
        controller.tick();
    }
    end(child);
}

#[test]
fn a_process_that_fills_the_budget_is_engaged_and_gets_a_limit() {
    let mut child = Command::new("python3")
        .args(["-c", "import sys; x=b'x'*(60<<20); print(flush=True); sys.stdin.read()"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 is needed for this test");
    std::io::Read::read_exact(child.stdout.as_mut().expect("stdout"), &mut [0]).expect("ready");
    let segment = segment();
    let index = segment.claim(child.id(), 0).expect("slot");
    let slot = segment.slot(index);
    let mut roomy = controller(&child, segment, no_areas(segment), 512 << 20, false);
    roomy.tick();
    assert_eq!(slot.control.engage.load(Relaxed), 0, "it fits");
    let root = child.id();
    let mut controller = controller(&child, segment, no_areas(segment), 64 << 20, false);
    controller.tick();
    assert_eq!((slot.control.engage.load(Relaxed), slot.control.wake_seq.load(Relaxed)), (1, 1));
    let limit = slot.control.limit_bytes.load(Relaxed);
    assert!(limit > 55 << 20 && limit < 64 << 20, "{limit}");
    controller.tick();
    assert_eq!(slot.control.wake_seq.load(Relaxed), 1, "no wake-up without a new limit");
    assert!(controller.totals(root).peak_resident > 60 << 20);
    end(child);
}

#[test]
fn a_new_program_counts_as_growing_at_once_and_an_old_one_does_not() {
    let grown = |was_there: bool, forked_from: u32| {
        let segment = segment();
        let child = sleeper();
        let mut controller = controller(&child, segment, no_areas(segment), 64 << 20, false);
        if !was_there {
            controller.tick();
        }
        let index = segment.claim(child.id(), forked_from).expect("slot");
        assert!(controller.tree.admit(child.id()));
        let member = TickMember {
            pid: child.id(),
            slot: Some(index),
            run: child.id(),
            group: GroupIndex::ROOT,
        };
        // Some memory it has by now.
        while controller.tree.used(child.id()) == 0 {
            std::thread::sleep(Duration::from_millis(5));
            controller.tree.sample();
        }
        let process = controller.judge(&member, &HashMap::new(), Duration::from_millis(1));
        end(child);
        process.growth
    };
    assert!(grown(false, 0) > 0);
    assert_eq!(grown(true, 0), 0, "it may have begun long ago");
    assert_eq!(grown(false, std::process::id()), 0, "a fork has what its parent had");
}

#[test]
fn waiting_for_a_slow_device_is_pressure_though_few_bytes_move() {
    let segment = segment();
    let child = sleeper();
    let slot = segment.slot(segment.claim(child.id(), 0).expect("slot"));
    slot.set_state(ProcState::Engaged);
    slot.usage.swapped_file_bytes.store(100 << 20, Relaxed);
    let mut controller = controller(&child, segment, no_areas(segment), 64 << 20, false);
    controller.tick();
    let pressure = |controller: &mut MemoryController| {
        let member = TickMember {
            pid: child.id(),
            slot: Some(segment.claimed().next().expect("the slot").0),
            run: child.id(),
            group: GroupIndex::ROOT,
        };
        controller.judge(&member, &HashMap::new(), Duration::from_secs(2)).pressure >> 20
    };
    assert_eq!(pressure(&mut controller), 0);
    slot.count(Counter::StallUs, 1_000_000);
    assert!((40..50).contains(&pressure(&mut controller)), "half of the time, since two seconds");
    // A wait that continues.
    slot.usage.stalled_since.store(now().0 - 3_000_000_000, Relaxed);
    assert!(pressure(&mut controller) > 85);
    // It ends, and was counted.
    slot.usage.stalled_since.store(0, Relaxed);
    slot.count(Counter::StallUs, 3_000_000);
    assert!(pressure(&mut controller) < 20, "no thread waits any more");
    assert_eq!(controller.totals(child.id()).get(Counter::StallUs), 4_000_000);
    // A process that is stopped wants nothing, whatever it waited for.
    for _ in 0..10 {
        pressure(&mut controller);
    }
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::STOP,
    )
    .expect("stop");
    while !proc_info(child.id()).expect("the child").stopped {
        std::thread::yield_now();
    }
    slot.usage.stalled_since.store(now().0 - 3_000_000_000, Relaxed);
    assert_eq!(pressure(&mut controller), 0);
    assert!(slot.stalls_for(now()) < Duration::from_secs(2), "nor is it counted when it continues");
    end(child);
}

#[test]
fn strict_kills_only_when_swap_is_full_and_the_budget_exceeded() {
    let segment = segment();
    // What the run's root has started is killed, and the root sees it.
    let child = Command::new("sh")
        .args(["-c", "sleep 600; exit 5"])
        .stdin(Stdio::null())
        .spawn()
        .expect("sh");
    let slot = segment.slot(segment.claim(child.id(), 0).expect("slot"));
    slot.count(Counter::SwapFull, 1);
    let root = child.id();
    let mut controller = controller(&child, segment, no_areas(segment), 64 << 20, true);
    controller.tick();
    assert!(!controller.totals(root).strict_kill, "within the budget");
    while controller.tree.pids().count() < 2 {
        std::thread::sleep(Duration::from_millis(5));
        controller.tick();
    }
    slot.count(Counter::SwapFull, 1);
    let member = TickMember { pid: root, slot: None, run: root, group: GroupIndex::ROOT };
    let process = Process {
        group: 0,
        standing: Standing::Engaged,
        used: 80 << 20,
        pressure: 0,
        fixed: 0,
        swapped: 0,
        limit: 0,
        growth: 0,
        engine_goes_first: true,
        kept: 0,
        workingset: 0,
    };
    controller.enforce(root, &[member], &[process]);
    assert!(controller.totals(root).strict_kill);
    let mut child = child;
    let status = child.wait().expect("wait");
    assert_eq!(status.code(), Some(5));
}
