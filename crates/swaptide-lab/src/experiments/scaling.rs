//! `lab scaling`: how far 1 to 64 threads get in the engine's data structures, without a
//! userfaultfd and without a program ([`swaptide_engine::scaling`]).
//!
//! *before* is one thread, *after* are all of them: operations a second, of all together. With N
//! CPUs a part that scales has N times as many; the notes say what was seen. Each part has rows of
//! its own, so that it shows which of them holds the whole back.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use swaptide_engine::scaling::{MAX_THREADS, StepKind, Structures};

use crate::context::Lab;
use crate::measure::{median, use_yield};
use crate::report::{Curve, LabReport, Plot, Row};

const KINDS: [(StepKind, &str); 4] = [
    (StepKind::Whole, "fault and reclaim"),
    (StepKind::PageTable, "page table"),
    (StepKind::Slots, "slots and swap cache"),
    (StepKind::Accounts, "account and counters"),
];
/// 256 MiB of pages.
const PAGES: usize = 65_536;
/// Steps between two looks at the clock.
const STEPS: usize = 64;

/// Operations a second of `threads` threads in `time`.
fn run(structures: &Structures, part: StepKind, threads: usize, time: Duration) -> f64 {
    let (barrier, is_over) = (Barrier::new(threads + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let work = |number| {
            let mut thread = structures.thread(number);
            let (barrier, is_over) = (&barrier, &is_over);
            scope.spawn(move || {
                let mut steps = 0;
                barrier.wait();
                while !is_over.load(Relaxed) {
                    (0..STEPS).for_each(|_| thread.step(part));
                    steps += STEPS;
                }
                steps
            })
        };
        let handles: Vec<_> = (0..threads).map(work).collect();
        barrier.wait();
        let begin = Instant::now();
        std::thread::sleep(time);
        is_over.store(true, Relaxed);
        let steps = handles.into_iter().map(|handle| handle.join().expect("a thread's steps"));
        steps.sum::<usize>() as f64 / begin.elapsed().as_secs_f64()
    })
}

/// Measures all parts.
///
/// # Errors
/// When memory is refused.
pub(crate) fn measure(lab: &Lab, quick: bool) -> Result<LabReport, String> {
    use_yield();
    let threads: &[usize] = if quick { &[1, 2, 8] } else { &[1, 2, 4, 8, 16, 32, 64] };
    let (time, runs) =
        if quick { (Duration::from_millis(50), 1) } else { (Duration::from_millis(300), 5) };
    let structures = Structures::new(PAGES).map_err(|error| error.to_string())?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut rows, mut curves, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    lab.progress.expect(KINDS.len() as u64, KINDS.len() as u64);
    for (part, name) in KINDS {
        lab.progress.begin(name);
        let speeds: Vec<f64> = threads
            .iter()
            .map(|&n| median((0..runs).map(|_| run(&structures, part, n, time)).collect()))
            .collect();
        let millions = |speed: f64| speed / 1e6;
        for (&n, &speed) in threads.iter().zip(&speeds).skip(1) {
            let case = format!("{name}, {n} threads");
            rows.push(Row::new(case, "operations", "M/s", millions(speeds[0]), millions(speed)));
        }
        let points = threads.iter().zip(&speeds).map(|(&n, &s)| (n as f64, millions(s)));
        curves.push(Curve { name: name.into(), ours: true, points: points.collect() });
        notes.push(seen(name, threads, &speeds, cpus));
    }
    Ok(LabReport {
        name: "scaling",
        title: format!("the engine's data structures, by 1 to {MAX_THREADS} threads; {cpus} CPUs"),
        rows,
        plot: Plot { x: "threads".into(), y: "M/s".into(), log_x: true, curves },
        notes,
    })
}

/// What was seen of a part, in words.
fn seen(name: &str, threads: &[usize], speeds: &[f64], cpus: usize) -> String {
    let factors = speeds.iter().map(|speed| speed / speeds[0]);
    let best = threads.iter().zip(factors).max_by(|a, b| a.1.total_cmp(&b.1));
    let (&at, most) = best.unwrap_or((&1, 1.0));
    let last = speeds.last().map_or(1.0, |speed| speed / speeds[0]);
    format!(
        "{name}: {:.0} ns an operation with one thread; at most {most:.2} times its throughput \
        ({at} threads), {last:.2} times with {}; {cpus} CPUs could give {cpus}",
        1e9 / speeds[0],
        threads.last().unwrap_or(&1),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_are_measured_with_several_threads() {
        let report = measure(&Lab::quiet(), true).expect("memory");
        assert_eq!((report.rows.len(), report.notes.len()), (8, 4));
        for row in &report.rows {
            assert!(row.before > Some(0.0) && row.after > Some(0.0), "{row:?}");
        }
    }

    #[test]
    fn best_and_last_result_are_shown() {
        let text = seen("page table", &[1, 2, 8], &[1e6, 1.5e6, 0.8e6], 2);
        assert!(text.starts_with("page table: 1000 ns an operation"), "{text}");
        assert!(
            text.contains("1.50 times its throughput (2 threads), 0.80 times with 8"),
            "{text}"
        );
    }
}
