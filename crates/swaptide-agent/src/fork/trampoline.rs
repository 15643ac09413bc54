//! Without fork events: where a forked child begins.
//!
//! The supervisor follows the forking thread through its fork and has the child begin at [`entry`],
//! on a stack of this library's, before it runs any code of the program's or libc's: what is
//! swapped would be zeros there as long as the child has no userfaultfd. When it has one, every
//! register is as fork(2) has left it, and the child continues.
//!
//! Owns: the child's first stack, and the connection on which the supervisor waits. One fork at a
//! time uses them, under [`crate::process::FORK_LOCK`]; what a child leaves in its copy is never
//! read again.
//!
//! Locks: none.

use std::cell::UnsafeCell;

use swaptide_engine::Engine;
use swaptide_engine::fork::child_uffd::STACK_BYTES;
use swaptide_sys::errno::ErrnoText;
use swaptide_sys::high_fds::SocketNumber;
use swaptide_sys::sock::Conn;
use swaptide_sys::thread::{abort_with, gettid};

use crate::process;

/// Bytes for all registers that XSAVE keeps, whatever the CPU has.
const XSAVE_BYTES: usize = 16 << 10;
/// The words that the supervisor writes: the child's start address and its stack.
const WORDS: usize = 64;

#[repr(C, align(64))]
struct ChildTrampoline {
    registers: UnsafeCell<[u8; XSAVE_BYTES]>,
    stack: UnsafeCell<[u8; STACK_BYTES]>,
    words: UnsafeCell<[u8; WORDS]>,
}

// SAFETY: written to by the supervisor and by the first and only thread of a child, in the child's
// own copy.
unsafe impl Sync for ChildTrampoline {}

static CHILD_TRAMPOLINE: ChildTrampoline = ChildTrampoline {
    registers: UnsafeCell::new([0; XSAVE_BYTES]),
    stack: UnsafeCell::new([0; STACK_BYTES]),
    words: UnsafeCell::new([0; WORDS]),
};

/// The connection to the supervisor, in the forking thread's table and in its child's.
static TRACER_CONN: SocketNumber = SocketNumber::none();

/// In the forking thread, before its fork: asks the supervisor to follow it. False if it will not,
/// or may not.
pub(crate) fn follow(engine: &Engine) -> bool {
    engine.fork.open_ends();
    let conn = engine.fork.child_end().and_then(|_| {
        let entry = entry as *const () as u64;
        process::ask_to_follow(gettid().0, entry, CHILD_TRAMPOLINE.words.get() as u64)
    });
    match conn {
        Some(conn) => {
            TRACER_CONN.set(conn.into_fd());
            true
        }
        None => {
            engine.fork.close_end(false);
            engine.fork.close_end(true);
            false
        }
    }
}

fn take() -> Option<Conn> {
    TRACER_CONN.take().map(Conn::from_fd)
}

/// In the forking thread, after its fork: the supervisor need not follow it any more.
pub(crate) fn leave() {
    drop(take());
}

/// The first code that the child runs.
extern "C" fn begin() {
    let Some(engine) = process::inherited_engine() else { return };
    if let Err(errno) = swaptide_engine::fork::child_uffd::child_init(engine) {
        abort_with(&[
            b"swaptide: cannot set up a userfaultfd in a forked child (",
            ErrnoText::new(errno).as_bytes(),
            b"); it is stopped rather than given wrong data",
        ]);
    }
    // Now the parent may continue.
    if let Some(follower) = take() {
        let _ = follower.send(b"B", &[]);
    }
}

/// The address at which the supervisor starts the child: no register but the stack's is another one
/// than fork(2) has left.
///
/// # Safety
/// Begun by the supervisor alone, with the stack at [`ChildTrampoline::words`].
#[unsafe(naked)]
unsafe extern "C" fn entry() {
    core::arch::naked_asm!(
        "push rax",
        "push rbx",
        "push rdx",
        "push rsi",
        "push rdi",
        "push rbp",
        "push r8",
        "push r9",
        "push r10",
        "push r11",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "pushfq",
        // Sixteen words, so that the stack is as a call wants it.
        "push rcx",
        "cld",
        "mov eax, -1",
        "mov edx, -1",
        "xsave64 [rip + {trampoline}]",
        "call {begin}",
        "mov eax, -1",
        "mov edx, -1",
        "xrstor64 [rip + {trampoline}]",
        "pop rcx",
        "popfq",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop r11",
        "pop r10",
        "pop r9",
        "pop r8",
        "pop rbp",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop rbx",
        "pop rax",
        // A system call leaves rcx to be used.
        "mov rcx, qword ptr [rip + {trampoline} + {words}]",
        "mov rsp, qword ptr [rip + {trampoline} + {words} + 8]",
        "jmp rcx",
        trampoline = sym CHILD_TRAMPOLINE,
        begin = sym begin,
        words = const std::mem::offset_of!(ChildTrampoline, words),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_ends_where_the_words_begin() {
        let end = CHILD_TRAMPOLINE.stack.get() as usize + STACK_BYTES;
        assert_eq!(end, CHILD_TRAMPOLINE.words.get() as usize);
        assert!(
            end.is_multiple_of(64)
                && (CHILD_TRAMPOLINE.registers.get() as usize).is_multiple_of(64)
        );
        assert!(take().is_none());
    }
}
