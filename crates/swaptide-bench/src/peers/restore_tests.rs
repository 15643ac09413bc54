//! Putting back, tried on a copy of the kernel's files and with tools that only note what they were
//! asked.

use super::*;
use crate::peers::cgroup::{Cgroup, Hierarchy};
use crate::peers::kernel::{Folios, KernelPeer, Setup};

const SWAPS: &str = "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n";

/// A tree of files that looks like a machine, removed when dropped.
struct Fake {
    root: PathBuf,
    machine: Machine,
    calls: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    fn new(name: &str) -> Self {
        let root =
            std::env::temp_dir().join(format!("swaptide-fake-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let calls: Arc<Mutex<Vec<String>>> = Arc::default();
        let (log, swaps) = (calls.clone(), root.join("proc/swaps"));
        let tool = move |name: &str, args: &[&OsStr]| {
            let args: Vec<_> = args.iter().map(|a| a.to_string_lossy().into_owned()).collect();
            log.lock().unwrap().push(format!("{name} {}", args.join(" ")));
            let device = args.last().cloned().unwrap_or_default();
            let list = std::fs::read_to_string(&swaps).unwrap();
            let list = match name {
                "swapon" if device.contains("broken") => return Err("swapon failed".into()),
                "swapon" => format!("{list}{device} file 1 0 32767\n"),
                "swapoff" => list
                    .lines()
                    .filter(|l| !l.starts_with(&device))
                    .map(|l| format!("{l}\n"))
                    .collect(),
                _ => list,
            };
            std::fs::write(&swaps, list).map_err(|e| e.to_string())
        };
        let fake = Fake { machine: Machine::fake(&root, Arc::new(tool)), root, calls };
        for (path, text) in [
            ("proc/swaps", SWAPS),
            ("proc/meminfo", "Zswap: 4 kB\n"),
            ("proc/mounts", "none /sys/fs/cgroup cgroup2 rw 0 0\n"),
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory io\n"),
            ("sys/fs/cgroup/cgroup.subtree_control", "cpu\n"),
            ("sys/class/zram-control/hot_add", "7\n"),
            ("sys/class/zram-control/hot_remove", ""),
            ("sys/block/zram7/comp_algorithm", "lzo [lz4]\n"),
            ("sys/block/zram7/disksize", "0"),
            ("sys/block/zram7/mm_stat", "4096 100 200 0 0"),
            ("sys/block/zram7/reset", ""),
            ("sys/module/zswap/parameters/enabled", "N\n"),
            ("sys/module/zswap/parameters/compressor", "lzo\n"),
            ("sys/module/zswap/parameters/max_pool_percent", "20\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            (
                "sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled",
                "always inherit madvise [never]\n",
            ),
            (
                "sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled",
                "always [inherit] madvise never\n",
            ),
        ] {
            let path = fake.root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        std::fs::create_dir_all(fake.root.join("var/tmp")).unwrap();
        fake
    }

    fn text(&self, path: &str) -> String {
        self.machine.read(path).unwrap()
    }

    fn setup(
        &self,
        restorer: &Restorer,
        peer: KernelPeer,
        folios: Folios,
    ) -> Result<Setup, String> {
        Setup::new(restorer, peer, folios, 1 << 20, Path::new("/var/tmp"), 50)
    }

    fn assert_as_before(&self) {
        assert_eq!(self.text("/proc/swaps"), SWAPS.trim_end());
        assert_eq!(self.text("/sys/module/zswap/parameters/enabled"), "N");
        assert_eq!(self.text("/sys/module/zswap/parameters/compressor"), "lzo");
        assert_eq!(self.text("/sys/module/zswap/parameters/max_pool_percent"), "20");
        assert_eq!(
            std::fs::read_dir(self.root.join("var/tmp")).unwrap().count(),
            0,
            "the swap file is left"
        );
        let thp = "/sys/kernel/mm/transparent_hugepage";
        // The copy holds what was written last: the word that had been chosen.
        assert_eq!(chosen(&self.text(&format!("{thp}/hugepages-64kB/enabled"))), "never");
        assert_eq!(chosen(&self.text(&format!("{thp}/hugepages-2048kB/enabled"))), "inherit");
        assert_eq!(chosen(&self.text(&format!("{thp}/enabled"))), "madvise");
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

#[test]
fn zram_is_set_up_and_taken_away() {
    let fake = Fake::new("zram");
    let restorer = Restorer::new(fake.machine.clone());
    let setup = fake.setup(&restorer, KernelPeer::Zram, Folios::Large).unwrap();
    assert_eq!(setup.held().ram, 200);
    assert_eq!(fake.text("/sys/block/zram7/disksize"), "1048576");
    assert!(fake.machine.swap_is_on(Path::new("/dev/zram7")));
    assert_eq!(fake.text("/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled"), "always");
    drop(setup);
    fake.assert_as_before();
    assert_eq!(fake.text("/sys/block/zram7/reset"), "1");
    assert_eq!(fake.text("/sys/class/zram-control/hot_remove"), "7");
    let calls = fake.calls.lock().unwrap().clone();
    assert_eq!(calls, ["mkswap /dev/zram7", "swapon -p 32767 /dev/zram7", "swapoff /dev/zram7"]);
}

#[test]
fn zswap_and_its_file_are_set_up_and_taken_away() {
    let fake = Fake::new("zswap");
    let restorer = Restorer::new(fake.machine.clone());
    let setup = fake.setup(&restorer, KernelPeer::Zswap, Folios::Small).unwrap();
    assert_eq!(setup.codec.as_deref(), Some("lz4"));
    assert_eq!(fake.text("/sys/module/zswap/parameters/enabled"), "Y");
    assert_eq!(setup.held().ram, 0, "what zswap held before is not this run's");
    std::fs::write(fake.root.join("proc/meminfo"), "Zswap: 10 kB\n").unwrap();
    assert_eq!(setup.held().ram, 6 * 1024);
    assert_eq!(std::fs::read_dir(fake.root.join("var/tmp")).unwrap().count(), 1);
    drop(setup);
    fake.assert_as_before();
}

#[test]
fn a_setup_that_fails_half_way_leaves_nothing() {
    let fake = Fake::new("half");
    let dir = fake.root.join("var/tmp/broken");
    std::fs::create_dir(&dir).unwrap();
    let restorer = Restorer::new(fake.machine.clone());
    let error = Setup::new(
        &restorer,
        KernelPeer::Zswap,
        Folios::Large,
        1 << 20,
        Path::new("/var/tmp/broken"),
        50,
    )
    .err()
    .unwrap();
    assert!(error.contains("swapon failed") && error.contains("--swap-dir"), "{error}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    std::fs::remove_dir(&dir).unwrap();
    fake.assert_as_before();
}

#[test]
fn a_failure_to_undo_does_not_stop_the_rest() {
    let fake = Fake::new("goeson");
    let mut undos = vec![
        Undo::Write { path: "/sys/module/zswap/parameters/enabled".into(), value: "first".into() },
        Undo::Write { path: "/no/such/setting".into(), value: "x".into() },
        Undo::RemoveFile("/var/tmp/never-made".into()),
        Undo::RemoveCgroup("/sys/fs/cgroup/never-made".into()),
        Undo::SwapOff("/dev/never-on".into()),
        Undo::RemoveZram(99),
    ];
    let failed = undo_down_to(&fake.machine, &mut undos, 0);
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(failed[0].contains("/no/such/setting"), "{failed:?}");
    assert_eq!(fake.text("/sys/module/zswap/parameters/enabled"), "first");
    assert!(fake.calls.lock().unwrap().is_empty(), "swapoff of what is not on");
}

#[test]
fn cgroup_v2_is_found_limited_and_removed() {
    let fake = Fake::new("cgroup");
    let restorer = Restorer::new(fake.machine.clone());
    let hierarchy = Hierarchy::find(&fake.machine).unwrap();
    assert_eq!(hierarchy, Hierarchy::V2("/sys/fs/cgroup".into()));
    let scope = restorer.scope();
    let group = Cgroup::create(&restorer, &hierarchy, Some(1 << 28)).unwrap();
    assert_eq!(fake.text("/sys/fs/cgroup/cgroup.subtree_control"), "+memory");
    let dir = fake.machine.path(group.procs().parent().unwrap());
    let limit = std::fs::read_to_string(dir.join("memory.max")).unwrap();
    assert_eq!(limit, "268435456");
    // Only the kernel's own directories vanish with files in them.
    std::fs::remove_file(dir.join("memory.max")).unwrap();
    drop(scope);
    assert!(!dir.exists());
    assert_eq!(fake.text("/sys/fs/cgroup/cgroup.subtree_control"), "-memory");
}

#[test]
fn cgroup_v1_goes_first_and_none_is_an_error() {
    let fake = Fake::new("cgroup1");
    let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup /sys/fs/cgroup/memory cgroup \
        rw,relatime,memory 0 0\n";
    std::fs::write(fake.root.join("proc/mounts"), mounts).unwrap();
    assert_eq!(
        Hierarchy::find(&fake.machine).unwrap(),
        Hierarchy::V1("/sys/fs/cgroup/memory".into())
    );
    std::fs::write(fake.root.join("proc/mounts"), "proc /proc proc rw 0 0\n").unwrap();
    assert!(Hierarchy::find(&fake.machine).unwrap_err().contains("mount -t cgroup2"));
}

#[test]
fn children_die_before_anything_is_undone() {
    let restorer = Restorer::new(Machine::real());
    let mut running = restorer.spawn(Command::new("sleep").arg("600")).unwrap();
    let begin = Instant::now();
    restorer.kill_children();
    assert!(begin.elapsed() < Duration::from_secs(60));
    let status = running.child.wait().unwrap();
    assert!(!status.success());
    drop(running);
    assert!(lock(&restorer.shared.children).is_empty());
}

/// Runs one test of this file again in a process of its own, where it finds `root` in its
/// environment.
fn rerun(test: &str, root: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let module = module_path!().split_once("::").unwrap().1;
    command
        .args(["--exact", &format!("{module}::{test}"), "--nocapture", "--test-threads=1"])
        .env(ROOT, root);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

const ROOT: &str = "SWAPTIDE_BENCH_TEST_ROOT";

/// In the process of its own: changes one setting under `root`, with signals and panics watched.
fn change_and_watch(root: &Path) {
    let restorer = Restorer::new(Machine::fake(root, Arc::new(|_: &str, _: &[&OsStr]| Ok(()))));
    restorer.watch_signals().unwrap();
    let (from, to) = (root.join("setting"), root.join("last"));
    restorer.at_interrupt(|| unreachable!("the next one stands for it"));
    restorer.at_interrupt(move || std::fs::copy(from, to).map(drop).unwrap());
    restorer.set("/setting", "changed").unwrap();
    // Nothing is dropped on the way out: only the hook and the signal thread can undo.
    std::mem::forget(restorer.scope());
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(90);
    while !done() {
        assert!(Instant::now() < end, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_panic_puts_the_machine_back() {
    if let Some(root) = std::env::var_os(ROOT) {
        change_and_watch(Path::new(&root));
        assert_eq!(std::fs::read_to_string(Path::new(&root).join("setting")).unwrap(), "changed");
        std::fs::write(Path::new(&root).join("was-changed"), "").unwrap();
        panic!("on purpose");
    }
    let fake = Fake::new("panic");
    std::fs::write(fake.root.join("setting"), "as it was").unwrap();
    let status = rerun("a_panic_puts_the_machine_back", &fake.root).status().unwrap();
    assert!(!status.success());
    assert!(fake.root.join("was-changed").exists());
    assert_eq!(fake.text("/setting"), "as it was");
}

#[test]
fn a_signal_puts_the_machine_back() {
    if let Some(root) = std::env::var_os(ROOT) {
        change_and_watch(Path::new(&root));
        std::thread::sleep(Duration::from_secs(120));
        panic!("no signal came");
    }
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let fake = Fake::new("signal");
        std::fs::write(fake.root.join("setting"), "as it was").unwrap();
        let mut child = rerun("a_signal_puts_the_machine_back", &fake.root).spawn().unwrap();
        wait_for("the change", || fake.text("/setting") == "changed");
        rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(status));
        assert_eq!(fake.text("/setting"), "as it was");
        assert_eq!(fake.text("/last"), "as it was", "done after everything was undone");
    }
}
