//! What promises cost: encryption, forks with everything swapped out, a database's dump in the
//! background.

use crate::report::comparison::{BenchReport, Better, SWAPTIDE, Spread, human};
use crate::run::{RunOutcome, Workload};
use crate::session::{Failed, Session, SideRuns, uncontested};
use crate::workload::phases::{PageContent, Phase};

/// What encrypting costs: nothing but a file to swap to, with and without.
pub(crate) fn cipher(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let data = session.args.data.unwrap_or(1 << 30);
    // What hardly shrinks is the most to encrypt for each page.
    let content = session.args.ratio.first().copied().unwrap_or(PageContent::One);
    let job = Workload { content, ..session.job(data, &[Phase::Fill, Phase::Seq]) };
    let file = format!("file:{}:{}", session.runner.dir.display(), 2 * data);
    let plain = format!("{file},cipher=none");
    let (mut without, mut with) = (SideRuns::default(), SideRuns::default());
    for run in 1..=session.runs {
        // The first side alternates, too.
        let turns = [(&mut without, &plain), (&mut with, &file)];
        let turns =
            if run % 2 == 1 { turns.into() } else { Vec::from_iter(turns.into_iter().rev()) };
        for (runs, area) in turns {
            session.say(area, session.ram, run);
            let outcome = session.runner.swaptide_on(Some(area), &job, session.ram)?;
            runs.add(outcome.total_mb_per_s(), session.ram, &outcome);
        }
    }
    let title = format!(
        "{} of data {} in {}, {} runs",
        human(data),
        content.describe(),
        human(session.ram),
        session.runs
    );
    let mut report = session.report("cipher", &title, "MB/s", Better::Higher, data);
    report.pairs.push(uncontested("cipher=none", without.side(None)?, with.side(None)?));
    report.notes.push(
        "growth and refault in order together; the only swap space is an unlinked file".into(),
    );
    report
        .notes
        .push("with cipher=none pages are authenticated all the same, by a keyed hash".into());
    Ok(report)
}

/// Cost of a fork with nothing of the parent resident, compared with all of it resident.
pub(crate) fn fork(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let data = session.args.data.unwrap_or(1 << 30);
    let resident = session.job(data, &[Phase::Fill, Phase::Fork]);
    let out = Workload { look: true, ..session.job(data, &[Phase::Fill, Phase::Out, Phase::Fork]) };
    // Tight enough that the program is served, and room for what is compressed.
    let ram = session.args.ram.unwrap_or(data / 2);
    let value = |o: &RunOutcome| {
        let done = o.phases.iter().find(|p| p.phase == Phase::Fork).filter(|p| p.pages > 0);
        done.map(|p| p.seconds / p.pages as f64 * 1e3).ok_or("nothing was forked".to_owned())
    };
    let (mut without, mut with) = (SideRuns::default(), SideRuns::default());
    for run in 1..=session.runs {
        session.say("without swaptide", ram, run);
        let outcome = session.runner.plain(&resident)?;
        without.add(value(&outcome)?, 0, &outcome);
        session.say(SWAPTIDE, ram, run);
        let outcome = session.runner.swaptide(&out, ram)?;
        let out = outcome.held.pages + outcome.held.on_areas;
        if out < data / 20 * 19 {
            let text = format!("only {} of {} were swapped out", human(out), human(data));
            return Err(Failed(1, text));
        }
        with.add(value(&outcome)?, ram, &outcome);
    }
    let title = format!(
        "a fork with {} resident, and with it swapped out, {} runs",
        human(data),
        session.runs
    );
    let mut report = session.report("fork", &title, "ms", Better::Lower, data);
    report.pairs.push(uncontested("without-swaptide", without.side(None)?, with.side(None)?));
    report.notes.push(
        "from the fork until its child, which ends at once, was waited for; the \
        mean of ten in a run"
            .into(),
    );
    Ok(report)
}

/// A dump in the background, half of what it reads swapped out.
pub(crate) fn bgsave(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let data = session.args.data.unwrap_or(2 * session.ram);
    let job = session.job(data, &[Phase::Redis, Phase::Bgsave, Phase::Bgsave, Phase::Bgsave]);
    let value = |o: &RunOutcome| {
        let saves: Vec<f64> = o
            .phases
            .iter()
            .filter(|p| p.phase == Phase::Bgsave && !p.capped)
            .map(|p| p.seconds)
            .collect();
        Spread::of(&saves).map(|s| s.median).ok_or("no dump was completed".to_owned())
    };
    let title = format!(
        "a Redis server with {} of values in {}, {} runs",
        human(data),
        human(session.ram),
        session.runs
    );
    let mut report = session.report("bgsave", &title, "s", Better::Lower, data);
    session.compare(&mut report, &job, &value)?;
    report.notes.push("the median of three dumps one after the other in each run".into());
    session.note_peers(&mut report);
    Ok(report)
}
