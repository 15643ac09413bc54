//! `swaptide run` around a program, without any swapping: what it passes through, what it refuses,
//! what it tells.
//!
//! The preloaded library of these tests is empty, so that only the supervisor is under test.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long anything may take on a machine that has other things to do: only what never comes
/// fails.
const RUN_TIMEOUT: Duration = Duration::from_secs(90);

/// Waits for `done`, asking again and again.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + RUN_TIMEOUT;
    while !done() {
        assert!(Instant::now() < deadline, "waited too long for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The state of a process as in /proc: `T` when stopped, `Z` when ended; `None` when it is gone.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat[stat.rfind(')')? + 2..].chars().next()
}

/// An empty library, built once.
fn empty_agent() -> &'static Path {
    static AGENT: OnceLock<PathBuf> = OnceLock::new();
    AGENT.get_or_init(|| {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("empty-agent-{}.so", std::process::id()));
        let status = Command::new("cc")
            .args(["-shared", "-x", "c", "/dev/null", "-o"])
            .arg(&path)
            .status()
            .expect("a C compiler");
        assert!(status.success());
        path
    })
}

fn swaptide() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_swaptide"));
    command
        .env("SWAPTIDE_AGENT", empty_agent())
        .env_remove("LD_PRELOAD")
        .env_remove("SWAPTIDE_SOCKET");
    command
}

fn run(arguments: &[&str]) -> Output {
    swaptide().arg("run").args(arguments).stdin(Stdio::null()).output().expect("swaptide")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn scratch(name: &str) -> PathBuf {
    let path =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a directory");
    path
}

fn send(pid: u32, signal: &str) {
    let status =
        Command::new("kill").args([signal, "--", &pid.to_string()]).status().expect("kill");
    assert!(status.success());
}

/// A run that is killed if the test fails before it ends.
struct Running(Child);

impl Running {
    fn start(arguments: &[&str]) -> Running {
        Running::spawn(swaptide().arg("run").args(arguments))
    }

    fn spawn(command: &mut Command) -> Running {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn();
        Running(child.expect("swaptide"))
    }

    fn line(&mut self) -> String {
        // One byte at a time: nothing of what follows may be taken away.
        let out = self.0.stdout.as_mut().expect("stdout");
        let (mut line, mut byte) = (Vec::new(), [0u8]);
        while out.read(&mut byte).expect("read") == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        String::from_utf8(line).expect("text")
    }

    fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        wait_for("the end of the run", || {
            status = self.0.try_wait().expect("wait");
            status.is_some()
        });
        status.expect("it has ended")
    }

    fn rest(&mut self) -> String {
        let mut text = String::new();
        self.0.stdout.as_mut().expect("stdout").read_to_string(&mut text).expect("read");
        text
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The whole group, supervisor and program too.
        let _ = Command::new("kill")
            .args(["-KILL", "--", &format!("-{}", self.0.id())])
            .stderr(Stdio::null())
            .status();
        let _ = self.0.wait();
    }
}

#[test]
fn the_programs_status_is_the_runs() {
    assert_eq!(run(&["--", "true"]).status.code(), Some(0));
    assert_eq!(run(&["--", "sh", "-c", "exit 37"]).status.code(), Some(37));
    for (signal, status) in [("KILL", 137), ("TERM", 143), ("SEGV", 139)] {
        let output = run(&["--", "sh", "-c", &format!("kill -{signal} $$")]);
        assert_eq!(output.status.code(), Some(status), "{signal}: {}", stderr(&output));
    }
}

#[test]
fn standard_streams_pass_through_untouched() {
    let mut running = Running::start(&["--quiet", "--", "cat"]);
    let data: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    let mut input = running.0.stdin.take().expect("stdin");
    let sent = data.clone();
    let writer = std::thread::spawn(move || input.write_all(&sent));
    let mut received = Vec::new();
    running.0.stdout.as_mut().expect("stdout").read_to_end(&mut received).expect("read");
    writer.join().expect("thread").expect("written");
    assert!(received == data);
    assert!(running.wait().success());
    let mut errors = String::new();
    running.0.stderr.as_mut().expect("stderr").read_to_string(&mut errors).expect("read");
    assert_eq!(errors, "");
}

#[test]
fn a_reader_sees_the_end_of_output_when_the_program_closes_it() {
    let mut running =
        Running::start(&["--quiet", "--", "sh", "-c", "echo out; exec >&-; read line; exit 4"]);
    assert_eq!(running.rest(), "out\n", "the end of the stream came while the program still runs");
    drop(running.0.stdin.take());
    assert_eq!(running.wait().code(), Some(4));
}

#[test]
fn the_program_gets_its_name_its_environment_and_the_library() {
    let output = swaptide()
        .args([
            "run",
            "--quiet",
            "--",
            "sh",
            "-c",
            "echo $0 $GREETING $LD_PRELOAD; cat /proc/$$/cmdline",
        ])
        .env("GREETING", "hello")
        .output()
        .expect("swaptide");
    let text = String::from_utf8_lossy(&output.stdout);
    let agent = std::fs::canonicalize(empty_agent()).expect("agent");
    assert!(text.starts_with(&format!("sh hello {}\nsh\0-c", agent.display())), "{text}");
}

#[test]
fn signals_for_the_supervisor_reach_the_program_once() {
    for signal in ["TERM", "INT", "HUP", "USR1", "USR2", "QUIT", "WINCH", "CONT"] {
        let script = format!(
            "n=0; trap 'n=$((n+1)); echo got $n' {signal}; trap 'echo $n; exit 9' ALRM; echo \
            ready; while :; do sleep 0.02; done"
        );
        let mut running = Running::start(&["--quiet", "--", "sh", "-c", &script]);
        drop(running.0.stdin.take());
        assert_eq!(running.line(), "ready");
        send(running.0.id(), &format!("-{signal}"));
        assert_eq!(running.line(), "got 1", "{signal}");
        // Time for a second one, which must not come.
        std::thread::sleep(Duration::from_millis(200));
        send(running.0.id(), "-ALRM");
        assert_eq!(running.line(), "1", "{signal}");
        assert_eq!(running.wait().code(), Some(9));
    }
}

#[test]
fn signals_for_the_whole_group_reach_the_program_once() {
    let script = "import signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *a: (got.append(1), print('got', flush=True)))
signal.signal(signal.SIGTERM, lambda *a: (print(len(got), flush=True), sys.exit(5)))
print('ready', flush=True)
while True: time.sleep(0.01)";
    let mut running = Running::start(&["--quiet", "--", "python3", "-c", script]);
    assert_eq!(running.line(), "ready");
    let group = Command::new("kill")
        .args(["-INT", "--", &format!("-{}", running.0.id())])
        .status()
        .expect("kill");
    assert!(group.success());
    assert_eq!(running.line(), "got");
    // Time for a second one, which must not come.
    std::thread::sleep(Duration::from_millis(300));
    send(running.0.id(), "-TERM");
    assert_eq!(running.line(), "1");
    assert_eq!(running.wait().code(), Some(5));
}

#[test]
fn a_stopped_program_stops_the_run_and_both_go_on_together() {
    let mut running =
        Running::start(&["--quiet", "--", "sh", "-c", "echo $$; read x; echo $x; exit 6"]);
    let program: u32 = running.line().parse().expect("the shell's number");
    let reaches = |pid: u32, stopped: bool| {
        let what = format!("process {pid} to be {}", if stopped { "stopped" } else { "going" });
        wait_for(&what, || (state(pid).expect("it lives") == 'T') == stopped);
    };
    send(program, "-STOP");
    reaches(running.0.id(), true);
    send(running.0.id(), "-CONT");
    reaches(program, false);
    reaches(running.0.id(), false);
    running.0.stdin.as_mut().expect("stdin").write_all(b"on\n").expect("write");
    assert_eq!(running.line(), "on");
    assert_eq!(running.wait().code(), Some(6));
}

#[test]
fn ignored_signals_stay_ignored() {
    let mut outer = Command::new("sh");
    outer.args([
        "-c",
        "trap '' HUP; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_swaptide"),
        "run",
        "--quiet",
        "--",
    ]);
    outer.args(["sh", "-c", "echo ready; read x; exit 8"]).env("SWAPTIDE_AGENT", empty_agent());
    let mut running = Running::spawn(&mut outer);
    assert_eq!(running.line(), "ready");
    send(running.0.id(), "-HUP");
    std::thread::sleep(Duration::from_millis(100));
    drop(running.0.stdin.take());
    assert_eq!(running.wait().code(), Some(8));
}

#[test]
fn a_terminal_belongs_to_the_program() {
    // A pseudo-terminal, in which ctrl-C is typed: the program gets one SIGINT and can read the
    // terminal as before.
    let script = r#"
import os, pty, sys, time
pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], 'run', '--quiet', '--', 'python3', '-u', '-c', '''
import signal, sys
got = []
signal.signal(signal.SIGINT, lambda *a: got.append(1))
print("tty", sys.stdin.isatty())
line = sys.stdin.readline().strip()
print("line", line, "ints", len(got))
sys.exit(11)
'''])
seen = b''
def until(mark):
    global seen
    while mark not in seen:
        seen += os.read(fd, 4096)
until(b'tty True')
os.write(fd, b'\x03')
time.sleep(0.3)
os.write(fd, b'typed\n')
until(b'line typed ints 1')
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status))
"#;
    let output = Command::new("timeout")
        .args(["120", "python3", "-c", script, env!("CARGO_BIN_EXE_swaptide")])
        .env("SWAPTIDE_AGENT", empty_agent())
        .output()
        .expect("python3");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "11", "{}", stderr(&output));
}

#[test]
fn bad_input_is_one_line_that_names_the_flag_and_status_2() {
    let place = scratch("bad-input");
    let static_program = place.join("static");
    std::fs::write(place.join("s.c"), "int main(void) { return 0; }").expect("write");
    let built = Command::new("cc")
        .arg("-static")
        .arg(place.join("s.c"))
        .arg("-o")
        .arg(&static_program)
        .status()
        .expect("cc");
    assert!(built.success(), "a static C library is needed for this test");
    let suid = place.join("suid");
    std::fs::copy("/bin/true", &suid).expect("copy");
    std::fs::set_permissions(&suid, std::fs::Permissions::from_mode(0o4755)).expect("chmod");
    let (static_program, suid) =
        (static_program.to_str().expect("path"), suid.to_str().expect("path"));
    for (arguments, parts) in [
        (vec!["--ram", "lots", "--", "true"], ["--ram", "lots"]),
        (vec!["--ram", "-5M", "--", "true"], ["--ram", "-5M"]),
        (vec!["--ram", "1M", "--", "true"], ["--ram", "16M"]),
        (vec!["--ram", "0%", "--", "true"], ["--ram", "not more than zero"]),
        (vec!["--swap", "floppy", "--", "true"], ["--swap", "floppy"]),
        (vec!["--swap", "file:/no/such/place", "--", "true"], ["--swap", "/no/such/place"]),
        (vec!["--swap", "file:/proc", "--", "true"], ["--swap", "/proc"]),
        (vec!["--swap", "zram:4K", "--", "true"], ["--swap", "too small"]),
        (
            vec!["--report", "/no/such/place/r.json", "--", "true"],
            ["--report", "cannot be written"],
        ),
        (vec!["--frobnicate", "--", "true"], ["--frobnicate", "unexpected"]),
        (vec!["--", "no-such-program-anywhere"], ["no-such-program-anywhere", "not found"]),
        (vec!["--", "/etc/passwd"], ["/etc/passwd", "not executable"]),
        (vec!["--inject=never", "--", static_program], ["statically linked", "--inject"]),
        (vec!["--inject=often", "--", "true"], ["--inject", "often"]),
        // Nothing can be put into it: the agent of these tests is an empty library.
        (vec!["--", static_program], ["empty-agent", "install swaptide again"]),
        (vec!["--inject", "--", static_program], ["empty-agent", "install swaptide again"]),
        (vec!["--", suid], ["set-user-id", "ignores"]),
        (vec![], ["CMD", "required"]),
    ] {
        let output = run(&arguments);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{arguments:?}: {message}");
        assert!(message.starts_with("swaptide run: "), "{message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{arguments:?}: {message}");
        assert!(output.stdout.is_empty());
    }
    let without = swaptide()
        .args(["run", "--", "true"])
        .env("SWAPTIDE_AGENT", "/no/agent.so")
        .output()
        .expect("swaptide");
    assert_eq!(without.status.code(), Some(2));
    assert!(stderr(&without).contains("/no/agent.so"), "{}", stderr(&without));
    std::fs::remove_dir_all(place).expect("clean");
}

#[test]
fn the_summary_is_one_line_and_quiet_says_nothing() {
    let output = run(&["--ram", "64M", "--", "true"]);
    let message = stderr(&output);
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with("swaptide: true: ") && message.contains("64M budget"), "{message}");
    assert_eq!(stderr(&run(&["--quiet", "--ram", "64M", "--", "true"])), "");
}

#[test]
fn report_of_tree_replaces_older_report() {
    let place = scratch("report");
    let path = place.join("r.json");
    // It stays long enough to be looked at even where the supervisor has to wait for its turn.
    let program = "import time; x = b'x' * (48 << 20); time.sleep(1.5); raise SystemExit(3)";
    // A shell in between: the tree counts, not the program alone.
    let shell = format!("python3 -c \"{program}\"; exit $?");
    std::fs::write(&path, "old").expect("write");
    let output = run(&[
        "--ram",
        "512M",
        "--report",
        path.to_str().expect("path"),
        "--quiet",
        "--",
        "sh",
        "-c",
        &shell,
    ]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).expect("report")).expect("json");
    assert_eq!(report["exit_status"], 3);
    assert_eq!(report["budget_bytes"], 512u64 << 20);
    let peak = report["peak_resident_bytes"].as_u64().expect("bytes");
    // Once, not twice: an interpreter and a shell come to some 15 MB.
    assert!((48 << 20..92 << 20).contains(&peak), "{peak}");
    assert!(report["wall_s"].as_f64().expect("seconds") >= 1.5);
    assert_eq!(report["stats"]["pswpout"], 0);
    assert_eq!(std::fs::read_dir(&place).expect("list").count(), 1);
    std::fs::remove_dir_all(place).expect("clean");
}

#[test]
fn what_outlives_the_program_is_supervised_until_it_ends() {
    let script = "(setsid sh -c 'exec >&- 2>&-; touch $0.there; read x; touch $0' $0 <&3 &) 3<&0; \
        echo started";
    let place = scratch("orphan");
    let mark = place.join("mark");
    let mut running =
        Running::start(&["--quiet", "--", "sh", "-c", script, mark.to_str().expect("path")]);
    assert_eq!(running.line(), "started");
    assert_eq!(running.wait().code(), Some(0), "the run ends with the program");
    let group = running.0.id().to_string();
    let supervisors = || {
        let listed = Command::new("pgrep").args(["-g", &group]).output().expect("pgrep");
        String::from_utf8_lossy(&listed.stdout).lines().count()
    };
    // The orphan has a group of its own by then, and the shells in between are ended, if not yet
    // collected.
    wait_for("the orphan", || place.join("mark.there").exists());
    wait_for("the supervisor alone", || supervisors() == 1);
    drop(running.0.stdin.take());
    wait_for("the supervisor's end with the orphan's", || supervisors() == 0 && mark.exists());
    std::fs::remove_dir_all(place).expect("clean");
}

#[test]
fn killed_supervisor_keeps_program_and_status() {
    let mut running = Running::start(&["--", "sh", "-c", "echo $PPID; read x; exit 12"]);
    let supervisor: u32 = running.line().parse().expect("the parent's number");
    assert_ne!(supervisor, running.0.id());
    send(supervisor, "-KILL");
    wait_for("the supervisor's end", || state(supervisor).is_none_or(|state| state == 'Z'));
    drop(running.0.stdin.take());
    assert_eq!(running.wait().code(), Some(12));
    let mut lines = BufReader::new(running.0.stderr.as_mut().expect("stderr")).lines();
    let told = lines.next().expect("a line").expect("read");
    assert!(told.contains("supervisor was killed"), "{told}");

    let mut running =
        Running::start(&["--quiet", "--", "sh", "-c", "echo ready; read x; echo done"]);
    assert_eq!(running.line(), "ready");
    running.0.kill().expect("kill the launcher");
    assert_eq!(running.wait().signal(), Some(9));
    running.0.stdin.as_mut().expect("stdin").write_all(b"x\n").expect("write");
    assert_eq!(running.line(), "done", "the program continues without the launcher");
}

#[test]
fn a_run_inside_a_run_works() {
    let inner = env!("CARGO_BIN_EXE_swaptide");
    let output = run(&[
        "--quiet",
        "--",
        inner,
        "run",
        "--quiet",
        "--",
        "sh",
        "-c",
        "echo $LD_PRELOAD; exit 21",
    ]);
    assert_eq!(output.status.code(), Some(21), "{}", stderr(&output));
    let agent = std::fs::canonicalize(empty_agent()).expect("agent");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        agent.to_str().expect("path"),
        "once, not twice"
    );
}

#[test]
fn doctor_speaks_for_people_and_for_programs() {
    let text = swaptide().arg("doctor").output().expect("swaptide");
    let json = swaptide().args(["doctor", "--json"]).output().expect("swaptide");
    let diagnosis: serde_json::Value = serde_json::from_slice(&json.stdout).expect("json");
    assert_eq!(diagnosis["ok"].as_bool(), Some(text.status.success()));
    let lines = String::from_utf8_lossy(&text.stdout).lines().count();
    let count = |name: &str| diagnosis[name].as_array().map_or(0, Vec::len);
    assert_eq!(count("findings") + count("engines"), lines);
    let broken =
        swaptide().arg("doctor").env("SWAPTIDE_AGENT", "/no/agent.so").output().expect("swaptide");
    assert_eq!(broken.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&broken.stdout).contains("NO  library"));
}
