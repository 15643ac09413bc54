//! Runs a test's body in a process of its own, under a deadline: a lost wake-up hangs that process,
//! not the test run, and closing a userfaultfd there does no harm.

use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Set in the child, to the name of the test it is to run.
const CHILD: &str = "SWAPTIDE_SYS_TEST_CHILD";
/// In addition to what a test of given length is told to take (`SWAPTIDE_STRESS_SECONDS`),
/// five times over: it may have to wait for its turn.
const DEADLINE: Duration = Duration::from_secs(120);

/// Runs `body` in a child process that must end well within the deadline.
pub fn in_child(test: &str, body: impl FnOnce()) {
    if let Some((status, output)) = child_status(test, body) {
        assert!(status.success(), "{test} in its child: {status}\n{output}");
    }
}

/// Runs `body` in a child process; how that ended and what it wrote, or `None` in the child itself.
pub fn child_status(test: &str, body: impl FnOnce()) -> Option<(ExitStatus, String)> {
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
            .unwrap();
        body();
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, test)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let told = std::env::var("SWAPTIDE_STRESS_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0.0);
    let deadline = DEADLINE + Duration::from_secs_f64(5.0 * told);
    let start = Instant::now();
    let mut late = false;
    while child.try_wait().unwrap().is_none() {
        if !late && start.elapsed() > deadline {
            late = true;
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(!late, "{test}: no end after {deadline:?}\n{text}");
    Some((output.status, text))
}
