//! Connections of clients, closed in bounded time.
//!
//! The last reference to a socket with `SO_LINGER` is dropped by whichever thread drops it, and
//! that thread waits until what the socket has to send is sent: for hours, if its owner says so. A
//! client can queue such sockets in a message. That needs no rights, not even that the client is
//! served: closing its connection drops what was not received. So nothing of a client's is
//! dropped without a bound ([`bounded`]).
//!
//! A descriptor that was received is another matter. To close a file of a FUSE file system waits
//! for its server, and no signal ends that. So what a client had no reason to send is closed by a
//! thread of its own ([`close_apart`]).
//!
//! Owns: a timer for each thread that closes connections, and its signal, which is blocked but for
//! that moment.
//!
//! Locks: none.

use std::cell::RefCell;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Deref;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use swaptide_sys::sock::Conn;

/// How long something of a client's may take to be dropped, before it is interrupted; then this
/// often.
const DROP_TIMEOUT: Duration = Duration::from_millis(2);
/// Descriptors that are being closed by threads of their own; more stay open.
const MAX_CLOSED_APART: usize = 8;

/// How long a client waits that cannot be accepted: without a descriptor for it, say. It is told of
/// again at once.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The clients of a listener that `accept` waits at, for ever.
pub(crate) fn clients<C>(accept: impl Fn() -> io::Result<C>) -> impl Iterator<Item = C> {
    let next = move || accept().inspect_err(|_| std::thread::sleep(ACCEPT_PAUSE));
    std::iter::repeat_with(next).flatten()
}

/// A connection that a client made.
#[derive(Debug)]
pub(crate) struct ClientConn(ManuallyDrop<Conn>);

impl ClientConn {
    /// Takes over a connection that was accepted.
    pub(crate) fn new(conn: Conn) -> ClientConn {
        ClientConn(ManuallyDrop::new(conn))
    }

    /// The connection, to be closed by [`close`].
    pub(crate) fn into_inner(mut self) -> Conn {
        // SAFETY: what is left is forgotten, so that nothing uses it again.
        let conn = unsafe { ManuallyDrop::take(&mut self.0) };
        std::mem::forget(self);
        conn
    }
}

impl Deref for ClientConn {
    type Target = Conn;

    fn deref(&self) -> &Conn {
        &self.0
    }
}

impl Drop for ClientConn {
    fn drop(&mut self) {
        // SAFETY: it is dropped, so that nothing uses it again.
        close(unsafe { ManuallyDrop::take(&mut self.0) });
    }
}

/// Closes a client's connection.
pub(crate) fn close(conn: Conn) {
    if has_timer() { bounded(|| drop(conn)) } else { close_apart(conn.into_fd()) }
}

/// Has a descriptor closed that a client sent unasked, whatever it is, without waiting for that.
pub(crate) fn close_apart(fd: OwnedFd) {
    static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
    let number = fd.into_raw_fd();
    if UNDER_WAY.fetch_add(1, Relaxed) >= MAX_CLOSED_APART {
        // It stays open: there are limits to what a client can have open here.
        UNDER_WAY.fetch_sub(1, Relaxed);
        return;
    }
    let close = move || {
        // SAFETY: the number was given up above, and is this thread's alone.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
        UNDER_WAY.fetch_sub(1, Relaxed);
    };
    if std::thread::Builder::new().name("close".into()).spawn(close).is_err() {
        UNDER_WAY.fetch_sub(1, Relaxed);
    }
}

thread_local! {
    static TIMER: RefCell<Option<Timer>> = const { RefCell::new(None) };
}

/// True if this thread has a timer, or gets one now.
fn has_timer() -> bool {
    let has = |timer: &RefCell<Option<Timer>>| {
        let mut timer = timer.borrow_mut();
        if timer.is_none() {
            *timer = Timer::new();
        }
        timer.is_some()
    };
    TIMER.try_with(has).unwrap_or(false)
}

/// Runs `act`, which drops something of a client's: what can be interrupted there waits no longer
/// than [`DROP_TIMEOUT`] each time. Where no timer can be had it may wait for longer.
pub(crate) fn bounded<T>(act: impl FnOnce() -> T) -> T {
    if has_timer() {
        set_timer(DROP_TIMEOUT);
        let done = act();
        set_timer(Duration::ZERO);
        done
    } else {
        act()
    }
}

/// Arms or disarms this thread's timer.
fn set_timer(interval: Duration) {
    let _ = TIMER.try_with(|timer| {
        if let Some(timer) = &*timer.borrow() {
            timer.set(interval);
        }
    });
}

/// The signal of the timers. Real-time signals have no meaning of their own, and this is not one
/// of libc's.
fn signal() -> libc::c_int {
    libc::SIGRTMAX() - 3
}

/// Sends a signal to the thread that made it, again and again, while it is armed.
struct Timer(libc::timer_t);

impl Timer {
    fn new() -> Option<Timer> {
        extern "C" fn nothing(_: libc::c_int) {}
        static HANDLED: Once = Once::new();
        HANDLED.call_once(|| {
            let handler: extern "C" fn(libc::c_int) = nothing;
            // SAFETY: all zeros is an action without flags and with an empty mask; the handler does
            // nothing, so it may run anywhere. Without SA_RESTART the call returns.
            unsafe {
                let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
                action.sa_sigaction = handler as libc::sighandler_t;
                libc::sigaction(signal(), &action, std::ptr::null_mut());
            }
        });
        // SAFETY: all zeros is an event of no thread; what is set is what a signal to a thread
        // takes.
        let mut event: libc::sigevent = unsafe { MaybeUninit::zeroed().assume_init() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal();
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        let mut timer = MaybeUninit::uninit();
        // SAFETY: both are locals, and the second is written whole when the call succeeds.
        unsafe {
            (libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, timer.as_mut_ptr()) == 0)
                .then(|| Timer(timer.assume_init()))
        }
    }

    /// Sends the signal each `interval`, and has it reach this thread; no more, if that is zero.
    fn set(&self, interval: Duration) {
        let time = libc::timespec {
            tv_sec: interval.as_secs() as libc::time_t,
            tv_nsec: interval.subsec_nanos().into(),
        };
        let both = libc::itimerspec { it_interval: time, it_value: time };
        // SAFETY: the sets are locals, which the calls fill; a thread may change its own mask.
        let mask = |how: libc::c_int| unsafe {
            let mut own = MaybeUninit::uninit();
            libc::sigemptyset(own.as_mut_ptr());
            libc::sigaddset(own.as_mut_ptr(), signal());
            libc::pthread_sigmask(how, own.as_ptr(), std::ptr::null_mut());
        };
        if !interval.is_zero() {
            mask(libc::SIG_UNBLOCK);
        }
        // SAFETY: the timer is this one's own, and the times are a local.
        unsafe { libc::timer_settime(self.0, 0, &both, std::ptr::null_mut()) };
        if interval.is_zero() {
            // What has come by now has been delivered: nothing stays pending.
            mask(libc::SIG_BLOCK);
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer is this one's own.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::{ErrorKind, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd};
    use std::time::Instant;

    use swaptide_sys::sock::Listener;

    /// How long one of [`lingering`] keeps the thread that drops it.
    const LINGER: Duration = Duration::from_secs(5);

    /// A socket that cannot send what it has, and its other end.
    pub(crate) fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut socket =
            TcpStream::connect(listener.local_addr().expect("an address")).expect("connect");
        let (other, _) = listener.accept().expect("accept");
        let linger = libc::linger { l_onoff: 1, l_linger: LINGER.as_secs() as libc::c_int };
        // SAFETY: the option is a local, and as long as said.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of::<libc::linger>() as libc::socklen_t,
            )
        };
        assert_eq!(set, 0, "SO_LINGER");
        socket.set_nonblocking(true).expect("a socket");
        let full = loop {
            if let Err(error) = socket.write_all(&[0; 1 << 16]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        (socket, other)
    }

    /// Has `act` drop lingering sockets; it must not wait for them.
    pub(crate) fn assert_quick(act: impl FnOnce()) {
        let began = Instant::now();
        act();
        assert!(began.elapsed() < LINGER / 2, "it took {:?}", began.elapsed());
    }

    #[test]
    fn unread_bytes_of_a_client_keep_no_process() {
        let (listener, name) = Listener::bind_autogenerated().expect("a socket");
        let client = Conn::connect_abstract(name.as_bytes()).expect("connect");
        let mut others = Vec::new();
        for _ in 0..3 {
            let (socket, other) = lingering();
            client.send(b"x", &[socket.as_fd(), socket.as_fd()]).expect("send");
            others.push(other);
        }
        let (server, _) = listener.accept().expect("accept");
        let server = ClientConn::new(server);
        assert_quick(|| drop(server));
        let (socket, _other) = lingering();
        assert_quick(|| close_apart(socket.into()));
    }

    #[test]
    fn a_timer_is_silent_when_it_is_not_wanted() {
        for _ in 0..3 {
            bounded(|| std::thread::sleep(3 * DROP_TIMEOUT));
        }
        // SAFETY: the set is a local that the call fills.
        let pending = unsafe {
            let mut set = MaybeUninit::uninit();
            libc::sigpending(set.as_mut_ptr());
            libc::sigismember(set.as_ptr(), signal())
        };
        assert_eq!(pending, 0);
    }
}
