//! exec: what a program starts belongs to its tree, whatever environment it is given.
//!
//! The agent comes into a process by three variables of its environment. A program that starts
//! another one with an environment of its own making would start it without them, outside of the
//! budget; so they are put back on the way. Nothing is put back when a program names another run's
//! socket (a run inside a run), and what is there already stays as it is.
//!
//! Owns: the texts of the variables, written once by the constructor. Locks: none; nothing is
//! allocated, for all of this also runs in the child of a vfork, on its parent's memory: the new
//! array stands on the stack, or, if it is long, in a mapping that is gone with the call. A
//! thread's stack may have 16 KiB, and that of a signal handler less.

use std::ffi::{CStr, c_char, c_int};

use swaptide_ipc::{ENV_AGENT_LOG, ENV_SOCKET};
use swaptide_sys::mem::{map_scratch, unmap};
use swaptide_sys::page::{VirtAddr, VirtRange};

use crate::environment::{AGENT, LOG, PRELOAD, SOCKET};
use crate::probe::are_strings;

type Strings = *const *const c_char;

/// The variables that are missing in an environment.
struct Missing {
    entries: usize,
    /// The index of `LD_PRELOAD`, if it is set without the agent.
    preload_at: Option<usize>,
    /// Bytes of the new `LD_PRELOAD` that has to be put together.
    text: usize,
    add: [Option<&'static CStr>; 3],
}

/// # Safety
/// `envp` is null or a null-terminated array of NUL-terminated strings.
unsafe fn missing(envp: Strings) -> Option<Missing> {
    let socket = SOCKET.get()?;
    let agent = AGENT.get()?;
    let mut has = [None::<(usize, &[u8])>; 3];
    let mut entries = 0;
    if !envp.is_null() {
        loop {
            // SAFETY: the caller's promise.
            let entry = unsafe { *envp.add(entries) };
            if entry.is_null() {
                break;
            }
            // SAFETY: a non-null entry is a NUL-terminated string (caller).
            let entry = unsafe { CStr::from_ptr(entry) }.to_bytes();
            for (place, name) in has.iter_mut().zip([PRELOAD, ENV_SOCKET, ENV_AGENT_LOG]) {
                if let Some(value) =
                    entry.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
                {
                    *place = Some((entries, value));
                }
            }
            entries += 1;
        }
    }
    let [preload, has_socket, log] = has;
    if has_socket.is_some_and(|(_, value)| value != SOCKET.value(ENV_SOCKET)) {
        return None;
    }
    let path = AGENT.value(PRELOAD);
    let mut found = Missing { entries, preload_at: None, text: 0, add: [None; 3] };
    match preload {
        Some((_, value))
            if value
                .split(|b| *b == b':' || b.is_ascii_whitespace())
                .any(|entry| entry == path) => {}
        Some((at, value)) => {
            found.preload_at = Some(at);
            found.text = agent.to_bytes().len() + 1 + value.len() + 1;
        }
        None => found.add[0] = Some(agent),
    }
    if has_socket.is_none() {
        found.add[1] = Some(socket);
    }
    if log.is_none() {
        found.add[2] = LOG.get();
    }
    (found.preload_at.is_some() || found.add.iter().any(Option::is_some)).then_some(found)
}

/// Words of the array that comes in the place of one.
fn words(missing: &Missing) -> usize {
    missing.entries + 1 + missing.add.len() + missing.text.div_ceil(size_of::<usize>())
}

/// Writes the array, then the text of `LD_PRELOAD`.
///
/// # Safety
/// `envp` as for [`missing`], whose answer `missing` is; `room` has [`words`] words.
unsafe fn write(envp: Strings, missing: &Missing, room: *mut usize) {
    let mut at = 0;
    let mut push = |pointer: *const c_char| {
        // SAFETY: the caller's promise on the room.
        unsafe { room.add(at).write(pointer as usize) };
        at += 1;
    };
    // SAFETY: behind the array; the caller's promise on the room.
    let text = unsafe { room.add(missing.entries + 1 + missing.add.len()) }.cast::<u8>();
    for entry in 0..missing.entries {
        if missing.preload_at == Some(entry) {
            push(text.cast());
        } else {
            // SAFETY: the array has this many entries.
            push(unsafe { *envp.add(entry) });
        }
    }
    missing.add.iter().flatten().for_each(|variable| push(variable.as_ptr()));
    push(std::ptr::null());
    if let (Some(entry), Some(agent)) = (missing.preload_at, AGENT.get()) {
        let agent = agent.to_bytes();
        // SAFETY: the entry is the array's; the room has place for agent, colon, old value and NUL.
        unsafe {
            let old = CStr::from_ptr(*envp.add(entry)).to_bytes();
            let old = &old[PRELOAD.len() + 1..];
            text.copy_from_nonoverlapping(agent.as_ptr(), agent.len());
            let mut end = agent.len();
            if !old.is_empty() {
                text.add(end).write(b':');
                text.add(end + 1).copy_from_nonoverlapping(old.as_ptr(), old.len());
                end += 1 + old.len();
            }
            text.add(end).write(0);
        }
    }
}

/// Calls `f` with an array on the stack.
#[inline(never)]
unsafe fn on_stack<const WORDS: usize>(
    envp: Strings,
    missing: &Missing,
    f: &mut dyn FnMut(Strings) -> c_int,
) -> c_int {
    let mut room = [const { std::mem::MaybeUninit::<usize>::uninit() }; WORDS];
    // SAFETY: the caller has chosen a room that is large enough.
    unsafe { write(envp, missing, room.as_mut_ptr().cast()) };
    f(room.as_ptr().cast())
}

/// Calls `f` with an environment that has what a program of this tree needs; with the program's own
/// where that cannot be read, which is the kernel's to refuse.
///
/// # Safety
/// `envp` is null or a null-terminated array of NUL-terminated strings, or no readable memory.
pub(crate) unsafe fn with_environment(envp: Strings, mut f: impl FnMut(Strings) -> c_int) -> c_int {
    if !are_strings(envp) {
        return f(envp);
    }
    // SAFETY: the caller's promise.
    let Some(missing) = (unsafe { missing(envp) }) else { return f(envp) };
    let words = words(&missing);
    if words <= 128 {
        // SAFETY: the room is large enough.
        return unsafe { on_stack::<128>(envp, &missing, &mut f) };
    }
    if words <= 512 {
        // SAFETY: the room is large enough: at most 512 words are needed.
        return unsafe { on_stack::<512>(envp, &missing, &mut f) };
    }
    let bytes = VirtAddr(words * size_of::<usize>()).page_up().0;
    let Ok(room) = map_scratch(bytes) else { return f(envp) };
    // SAFETY: the buffer is large enough, and no other thread uses it.
    unsafe { write(envp, &missing, room.as_ptr().cast()) };
    let result = f(room.as_ptr().cast::<*const c_char>());
    let start = VirtAddr(room.as_ptr() as usize);
    let errno = crate::real::errno();
    // SAFETY: the call that read it is over.
    let _ = unsafe { unmap(VirtRange { start, end: start.offset(bytes) }) };
    crate::real::restore_errno(errno);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::remember;
    use std::ffi::CString;

    fn given(entries: &[&str]) -> Vec<String> {
        let texts: Vec<CString> =
            entries.iter().map(|entry| CString::new(*entry).expect("no NUL")).collect();
        let mut array: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        array.push(std::ptr::null());
        let mut seen = Vec::new();
        let mut collect = |envp: Strings| {
            // SAFETY: the array that `with_environment` passes on.
            let entry = |at: usize| unsafe { *envp.add(at) };
            // SAFETY: a string of it.
            let text =
                |e: *const c_char| unsafe { CStr::from_ptr(e) }.to_string_lossy().into_owned();
            seen.extend((0..).map(entry).take_while(|e| !e.is_null()).map(text));
            7
        };
        // SAFETY: the array is as it must be.
        assert_eq!(unsafe { with_environment(array.as_ptr(), &mut collect) }, 7);
        seen
    }

    #[test]
    fn missing_variables_restored_others_kept() {
        remember(b"/lib/agent.so", b"name", None);
        let ours = "SWAPTIDE_SOCKET=name";
        assert_eq!(given(&[]), ["LD_PRELOAD=/lib/agent.so", ours]);
        assert_eq!(
            given(&["A=1", "LD_PRELOAD=", "B="]),
            ["A=1", "LD_PRELOAD=/lib/agent.so", "B=", ours]
        );
        assert_eq!(
            given(&["LD_PRELOAD=x.so /y.so", ours]),
            ["LD_PRELOAD=/lib/agent.so:x.so /y.so", ours]
        );
        let whole = ["LD_PRELOAD=a:/lib/agent.so", ours, "Z=z"];
        assert_eq!(given(&whole), whole);
        let inner = ["SWAPTIDE_SOCKET=another"];
        assert_eq!(given(&inner), inner, "a run inside a run");
        for length in [100usize, 400, 1000, 30_000] {
            let many: Vec<String> = (0..length).map(|i| format!("V{i}={i}")).collect();
            let seen = given(&many.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(seen[..length], many);
            assert_eq!(seen[length..], ["LD_PRELOAD=/lib/agent.so", ours]);
        }
        // SAFETY: null is an empty environment.
        let null = unsafe { with_environment(std::ptr::null(), |envp| i32::from(!envp.is_null())) };
        assert_eq!(null, 1);
    }
}
