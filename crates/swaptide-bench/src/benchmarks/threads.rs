//! `swaptide bench threads`: the same phases with 1, 2, 4 and 8 threads, each with its own part of
//! the data. In random phases each touch is timed.

use crate::peers::kernel::{Folios, KernelPeer};
use crate::report::comparison::{BenchReport, Better, SWAPTIDE, Spread, human};
use crate::report::threads::{SerialFigures, ThreadsRow, ThreadsSide};
use crate::run::{RunOutcome, Workload};
use crate::session::{Failed, Session, SideRuns};
use crate::workload::phases::Phase;
use crate::workload::serial::SerialPart;

const PHASES: [Phase; 4] = [Phase::Fill, Phase::Seq, Phase::Random, Phase::Mixed];
pub(crate) const THREADS: [u16; 4] = [1, 2, 4, 8];

/// All rows, against the first peer.
pub(crate) fn threads(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let args = session.args;
    let counts = if args.threads.is_empty() { &THREADS[..] } else { &args.threads };
    let data = args.data.unwrap_or(1 << 30);
    let job = session.job(data, &PHASES);
    let title = format!(
        "{} of data {} in {}, MB/s of all threads, {} runs",
        human(data),
        job.content.describe(),
        human(session.ram),
        session.runs
    );
    let mut report = session.report("threads", &title, "MB/s", Better::Higher, data);
    let value = |outcome: &RunOutcome| {
        if outcome.capped() {
            return Err("a phase did not finish; give --seconds-cap more".to_owned());
        }
        Ok(outcome.total_mb_per_s())
    };
    for &threads in counts {
        let job = Workload { threads, latency: true, ..job.clone() };
        let (ours, theirs) = match session.peers.first() {
            Some(&peer) => {
                let runs = session.alternate(peer, &job, session.ram, &value)?;
                (runs.ours, runs.theirs.into_iter().map(|side| (peer, side)).collect())
            }
            None => (session.ours(&job, session.ram, &value)?, vec![]),
        };
        for phase in PHASES {
            report.rows.threads.push(ThreadsRow {
                threads,
                phase,
                ours: side(SWAPTIDE.into(), &ours, phase)?,
                theirs: better(&theirs, phase)?,
            });
        }
    }
    session.note_peers(&mut report);
    Ok(report)
}

/// The peer with the size of folio that is faster in the phase.
fn better(
    theirs: &[(KernelPeer, (Folios, SideRuns))],
    phase: Phase,
) -> Result<Option<ThreadsSide>, String> {
    let mut best: Option<ThreadsSide> = None;
    for (peer, (folios, runs)) in theirs {
        // The kernel may carry the work with one size alone.
        let Ok(side_of_runs) = runs.side(Some(*folios)) else { continue };
        let name = format!("{} {}", peer.name(), side_of_runs.detail);
        let this = side(name, runs, phase)?;
        if best.as_ref().is_none_or(|best| this.stats.median > best.stats.median) {
            best = Some(this);
        }
    }
    Ok(best)
}

fn side(name: String, runs: &SideRuns, phase: Phase) -> Result<ThreadsSide, String> {
    let of_runs = |value: &dyn Fn(&RunOutcome) -> Option<f64>| {
        Spread::of(&runs.outcomes.iter().filter_map(value).collect::<Vec<_>>())
    };
    let stats = of_runs(&|outcome| outcome.phase_mb_per_s(phase))
        .ok_or_else(|| format!("{name} did not finish the {} phase", phase.name()))?;
    let p99_us = of_runs(&|outcome| outcome.phase_p99_us(phase)).map(|spread| spread.median);
    Ok(ThreadsSide { name, stats, p99_us, serial: serial(runs, phase) })
}

/// The serial part of a phase, in a build that counts it.
fn serial(runs: &SideRuns, phase: Phase) -> Option<SerialFigures> {
    let median = |value: &dyn Fn(SerialPart, u64) -> f64| {
        let of_run = |outcome: &RunOutcome| {
            outcome.phase_serial(phase).map(|(serial, pages)| value(serial, pages))
        };
        Some(Spread::of(&runs.outcomes.iter().filter_map(of_run).collect::<Vec<_>>())?.median)
    };
    Some(SerialFigures {
        ns_per_fault: median(&|serial, _| serial.ns_for_each(serial.faults))?,
        ns_per_page: median(&|serial, pages| serial.ns_for_each(pages))?,
        holds_per_fault: median(&|serial, _| serial.holds as f64 / serial.faults.max(1) as f64)?,
        most_faults_per_s: median(&|serial, _| serial.most_faults_per_s())?,
    })
}
