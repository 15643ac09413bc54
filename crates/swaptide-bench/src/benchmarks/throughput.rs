//! Throughput under pressure, and the density of compressed memory.

use std::time::Duration;

use crate::peers::kernel::{KernelPeer, PoolUsage};
use crate::report::comparison::{BenchReport, Better, human};
use crate::run::{RunOutcome, Workload};
use crate::session::{Failed, Session};
use crate::workload::phases::{PAGE, PageContent, Phase};

/// One phase's throughput, with as much data as asked for.
pub(crate) fn memory(
    session: &Session<'_>,
    phase: Phase,
    phases: &[Phase],
) -> Result<BenchReport, Failed> {
    let (args, name) = (session.args, phase.name());
    let data = args.data.unwrap_or(1 << 30);
    let mut job = session.job(data, phases);
    if phase == Phase::Again {
        // What is touched once more must not still be there.
        job.touches = args.touches.unwrap_or(data as usize / PAGE);
    }
    let value =
        |o: &RunOutcome| o.phase_mb_per_s(phase).ok_or(format!("the {name} phase did not finish"));
    let title = format!(
        "{} of data {} in {}, {} runs",
        human(data),
        job.content.describe(),
        human(session.ram),
        session.runs
    );
    let mut report = session.report(name, &title, "MB/s", Better::Higher, data);
    let cut_short = session.compare(&mut report, &job, &value)?;
    note_cut_short(&mut report, &cut_short, &job);
    if args.strict_budget {
        report.unpaired.bare = Some(session.ours(&job, session.ram, &value)?.side(None)?);
    }
    session.note_peers(&mut report);
    Ok(report)
}

fn note_cut_short(report: &mut BenchReport, peers: &[KernelPeer], job: &Workload) {
    report.notes.extend(
        peers.iter().map(|peer| {
            format!("{}: a phase was cut short after {} s", peer.name(), job.seconds_cap)
        }),
    );
}

/// All phases of a job whose data does not fit compressed memory, so that it is written to a file:
/// the kernel's zswap may take a hundredth of the machine's memory, which is the least that it
/// can be told.
pub(crate) fn pressure(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let data = session.args.data.unwrap_or(2 << 30);
    let content = session.args.ratio.first().copied().unwrap_or(PageContent::Two);
    let job = Workload {
        content,
        zswap_percent: 1,
        ..session.job(data, &[Phase::Fill, Phase::Seq, Phase::Random])
    };
    let value = |o: &RunOutcome| {
        if o.ended { Err("the job did not finish".to_owned()) } else { Ok(o.total_mb_per_s()) }
    };
    let title = format!(
        "{} of data {} in {}, {} runs",
        human(data),
        content.describe(),
        human(session.ram),
        session.runs
    );
    let mut report = session.report("pressure", &title, "MB/s", Better::Higher, data);
    let cut_short = session.compare(&mut report, &job, &value)?;
    report.notes.extend(report.pairs.iter().map(|pair| {
        format!(
            "written to the file in a run, median: {} {}, swaptide {}",
            pair.name,
            human(pair.peer.written),
            human(pair.swaptide.written)
        )
    }));
    note_cut_short(&mut report, &cut_short, &job);
    session.note_peers(&mut report);
    Ok(report)
}

/// How much less RAM pages take, when there was time to do something for it.
pub(crate) fn pool(session: &Session<'_>) -> Result<BenchReport, Failed> {
    const SETTLE: Duration = Duration::from_secs(10);
    let data = session.args.data.unwrap_or(1 << 30);
    let content = session.args.ratio.first().copied().unwrap_or(PageContent::Two);
    let job = Workload { content, settle: SETTLE, look: true, ..session.job(data, &[Phase::Fill]) };
    let value = |o: &RunOutcome| match o.held {
        PoolUsage { ram: 1.., pages: 1.., .. } => Ok(o.held.pages as f64 / o.held.ram as f64),
        _ => Err("nothing was in compressed memory at the end".to_owned()),
    };
    let title = format!(
        "{} of data {} in {}, {} runs",
        human(data),
        content.describe(),
        human(session.ram),
        session.runs
    );
    let mut report = session.report("pool", &title, "x", Better::Higher, data);
    session.compare(&mut report, &job, &value)?;
    report.notes.push(
        "x: pages in compressed memory for each page of RAM that it takes, 10 s \
        after the last touch"
            .into(),
    );
    report.notes.push("of swaptide the column `pool` is the most it had".into());
    session.note_peers(&mut report);
    Ok(report)
}
