//! Programs of ordinary users.

use super::*;

/// Runs [`ordinary`] in a process that has given up every capability, and its user where that is
/// told. Its words about what it found.
fn ordinary_process(user: Option<u32>) -> String {
    // By this name the file may be executed wherever it lies.
    let mut command = Command::new("/proc/self/exe");
    command.arg("ordinary").stdout(Stdio::piped());
    let give_up = move || {
        for capability in 0..64 {
            // SAFETY: prctl takes numbers.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        }
        let Some(user) = user else { return Ok(()) };
        // SAFETY: both calls take numbers.
        match unsafe { libc::setresgid(user, user, user) | libc::setresuid(user, user, user) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure makes system calls only.
    unsafe { command.pre_exec(give_up) };
    let done = command.output().expect("a process");
    assert!(done.status.success(), "{:?}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("text")
}

fn is_root() -> bool {
    // SAFETY: the call takes nothing.
    unsafe { libc::geteuid() == 0 }
}

/// Root without capabilities may open its own `/dev/userfaultfd`.
pub(super) fn without_capabilities() {
    if !is_root() {
        return ordinary();
    }
    let said = ordinary_process(None);
    assert!(["NoForks", "UserMode"].contains(&said.trim()), "{said}");
}

/// An ordinary user on a machine that is set up for nothing.
pub(super) fn without_any_right() {
    if !is_root() {
        return ordinary();
    }
    let said = ordinary_process(Some(65534));
    let open_to_all = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd")
        .is_ok_and(|text| text.trim() == "1");
    assert_eq!(said.trim(), if open_to_all { "NoForks" } else { "UserMode" });
}

/// A region that goes out and is read back; what a system call finds where it is out, and what a
/// child of this process has of it.
pub(super) fn ordinary() {
    let (host, region) = start(512 * MIB, 24 * MIB);
    let words = Words::of(&region);
    words.fill();
    let reach = region.reach();
    println!("{reach:?}");
    let first = region.as_ptr().as_ptr();
    assert!(region.say(0, region.len(), Say::PageOut));
    until("all goes out", || host.out() == words.pages as u64);
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two numbers, and reads a page of the region.
    let written = unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        libc::write(ends[1], first.cast(), PAGE)
    };
    match reach {
        Reach::UserMode => assert_eq!(
            (written, std::io::Error::last_os_error().raw_os_error()),
            (-1, Some(libc::EFAULT))
        ),
        _ => assert_eq!(written, PAGE as isize),
    }
    // SAFETY: the child makes two system calls.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: asks whether the first page is mapped, and ends.
        unsafe { libc::_exit(i32::from(libc::msync(first.cast(), PAGE, libc::MS_ASYNC) == 0)) }
    }
    assert_eq!(
        wait_for(child),
        i32::from(reach == Reach::Whole) << 8,
        "whether a child has it mapped"
    );
    words.check_all();
    assert_eq!(host.counter(Counter::PagesPoisoned), 0);
}
