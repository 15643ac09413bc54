//! What swaptide costs a program that fits its budget, and the start of a program.

use std::path::Path;

use crate::report::comparison::{BenchReport, Better, SWAPTIDE, human};
use crate::run::{RunOutcome, Workload};
use crate::session::{Failed, Session, SideRuns, uncontested};
use crate::workload::phases::Phase;

/// The same work with and without swaptide, in a budget it never fills.
pub(crate) fn within(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let args = session.args;
    let data = args.data.unwrap_or(session.ram / 2);
    if data > session.ram / 4 * 3 {
        return Err(Failed(
            2,
            format!("--data {}: does not fit in --ram {}", human(data), human(session.ram)),
        ));
    }
    // About three seconds of writing, checking every word, and jumping about.
    let repeat = (8 * (1u64 << 30) / data).clamp(1, 10_000) as u32;
    let job =
        Workload { repeat, ..session.job(data, &[Phase::Fill, Phase::Verify, Phase::Random]) };
    let (mut without, mut with) = (SideRuns::default(), SideRuns::default());
    for run in 1..=session.runs {
        session.say("without swaptide", session.ram, run);
        let outcome = session.runner.plain(&job)?;
        without.add(outcome.wall_s, 0, &outcome);
        session.say(SWAPTIDE, session.ram, run);
        let outcome = session.runner.swaptide(&job, session.ram)?;
        with.add(outcome.wall_s, session.ram, &outcome);
    }
    let title = format!(
        "{} of data in a budget of {}, {} runs",
        human(data),
        human(session.ram),
        session.runs
    );
    let mut report = session.report("within", &title, "s", Better::Lower, data);
    let (least, ours) = (without.side(None)?.stats.min, with.side(None)?.stats.min);
    report.notes.push(format!(
        "ratio of the fastest runs, which a busy machine disturbs least: {:.3}",
        least / ours
    ));
    report.pairs.push(uncontested("without-swaptide", without.side(None)?, with.side(None)?));
    Ok(report)
}

/// Starts of a program in each run.
pub(crate) const STARTS: u32 = 20;

/// What starting a program costs.
pub(crate) fn startup(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let program = ["/usr/bin/true", "/bin/true"].map(Path::new).into_iter().find(|p| p.is_file());
    let program = program.ok_or_else(|| Failed(1, "there is no /usr/bin/true here".into()))?;
    let (mut without, mut with) = (SideRuns::default(), SideRuns::default());
    for run in 1..=session.runs * STARTS {
        session.say("starting", session.ram, run.div_ceil(STARTS));
        without.add(session.runner.time_program(program, None)? * 1e3, 0, &RunOutcome::default());
        with.add(
            session.runner.time_program(program, Some(session.ram))? * 1e3,
            session.ram,
            &RunOutcome::default(),
        );
    }
    let title = format!("{} starts of true", session.runs * STARTS);
    let mut report = session.report("startup", &title, "ms", Better::Lower, 0);
    report.pairs.push(uncontested("without-swaptide", without.side(None)?, with.side(None)?));
    Ok(report)
}
