//! The threads of an engine other than the handler: workers, fault servers, readers of remote
//! areas, and the one that watches for the end of the program.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use swaptide_engine::reclaim::worker::Worker;
use swaptide_engine::{Engine, serve_faults};
use swaptide_sys::affinity::{cpus_online, go_normally};
use swaptide_sys::thread::{exit_thread, set_name};

use crate::exit_watch;
use crate::past_libc;
use crate::process::{THREAD_STACK_BYTES, engine, spawn_with};

/// Starts the workers and the thread that watches for the end of the program.
pub(crate) fn start_workers(engine: &'static Engine) {
    let wanted = (cpus_online() / 2).clamp(1, 4);
    let mut running = 0;
    for index in 0..wanted {
        running += u32::from(spawn_with(THREAD_STACK_BYTES, worker, index as usize));
    }
    // Without it the process is only slow to end, in a case that hardly any program has.
    let watching = spawn_with(64 << 10, watch, 0);
    let holding = past_libc::is_program() && spawn_with(64 << 10, hold_forks, 0);
    engine.workers.running.store(running, Release);
    let others = u32::from(watching) + u32::from(holding);
    engine.slot().engine_threads.store(running + 1 + others, Relaxed);
}

/// Starts a thread that waits for servers.
pub(crate) fn spawn_reader() -> bool {
    spawn_with(THREAD_STACK_BYTES, reader, 0)
}

/// Starts a thread that serves faults next to the handler.
pub(crate) fn spawn_server() -> bool {
    spawn_with(THREAD_STACK_BYTES, server, 0)
}

extern "C" fn server(_: usize) {
    set_name(c"swaptide-fault");
    let Some(engine) = engine() else { exit_thread() };
    serve_faults(engine);
}

extern "C" fn reader(_: usize) {
    set_name(c"swaptide-read");
    // As a worker.
    go_normally();
    let Some(engine) = engine() else { exit_thread() };
    engine.serve_remote_reads();
}

extern "C" fn hold_forks(_: usize) {
    set_name(c"swaptide-fork");
    if let Some(engine) = engine() {
        past_libc::follow_orders(engine);
    }
}

extern "C" fn watch(_: usize) {
    if let Some(engine) = engine() {
        let is_retired = || engine.retired.load(Acquire);
        exit_watch::watch(engine.slot(), || engine.look_after_threads(), is_retired);
    }
}

extern "C" fn worker(index: usize) {
    set_name(c"swaptide-work");
    // Made by the handler, whose place in the queue it inherits and does not need.
    go_normally();
    let Some(engine) = engine() else { exit_thread() };
    // Until the program was detached.
    Box::leak(Box::new(Worker::new(engine.devices.scheme))).run(engine, index);
}
