//! `swaptide bench sweep`: one job in smaller and smaller budgets, with data that compresses well,
//! like a heap, and hardly.
//!
//! Owns the cells of the sweep and their order. At each budget swaptide runs with no more than
//! that; a kernel peer with that for resident pages and its pool outside; and swaptide again with
//! what the two came to. So below what a peer's pool takes there is swaptide alone: compressed
//! memory without a file behind it cannot go there.
//!
//! A cell that takes too long is cut and says so, from outside if it must be: a live-lock shows as
//! a cell that was cut.

use crate::peers::kernel::Folios;
use crate::report::comparison::{BenchReport, Better, Pairing, SWAPTIDE, Spread, human};
use crate::report::points::Point;
use crate::run::{RunOutcome, Workload};
use crate::session::{Failed, Session, SideRuns, save};
use crate::workload::phases::{PageContent, Phase};

/// The budgets when none are given.
const BUDGETS: [u64; 9] = [64, 96, 128, 192, 256, 384, 512, 768, 1024];
const PHASES: [Phase; 4] = [Phase::Fill, Phase::Seq, Phase::Random, Phase::Verify];
/// Random touches when no number is given: enough for a rate, few enough for the smallest budgets.
const DEFAULT_TOUCHES: usize = 20_000;
/// Seconds for each phase when no number is given.
const DEFAULT_PHASE_SECONDS: u64 = 60;

/// One peer in one cell: with each size of folio, and swaptide with as much memory.
#[derive(Default)]
struct PeerCell {
    theirs: Vec<(Folios, SideRuns)>,
    ours: Option<SideRuns>,
}

/// The whole sweep. A peer that cannot do a cell is a note; what swaptide cannot do is a
/// failure after the report.
pub(crate) fn sweep(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let args = session.args;
    let data = args.data.unwrap_or(2 << 30);
    let budgets = if args.budgets.is_empty() {
        BUDGETS.map(|mib| mib << 20).to_vec()
    } else {
        args.budgets.clone()
    };
    let contents = if args.ratio.is_empty() {
        vec![PageContent::Four, PageContent::Two, PageContent::One]
    } else {
        args.ratio.clone()
    };
    let touches = args.touches.unwrap_or(DEFAULT_TOUCHES);
    let (first, last) =
        (budgets.iter().min().copied().unwrap_or(0), budgets.iter().max().copied().unwrap_or(0));
    let title = format!(
        "{} of data filled, read in order, touched {touches} times at random and verified, in \
        {} to {}, {} of each",
        human(data),
        human(first),
        human(last),
        if session.runs == 1 { "one run".into() } else { format!("{} runs", session.runs) },
    );
    let mut report = session.report("sweep", &title, "MB/s", Better::Higher, data);
    report.budget = first;
    let cells = contents.len() as u64 * budgets.len() as u64;
    session.expect(cells * (u64::from(session.runs) + session.steps_with_peers()));
    for &content in &contents {
        let seconds_cap = args.seconds_cap.unwrap_or(DEFAULT_PHASE_SECONDS);
        let job = Workload { content, touches, seconds_cap, ..session.job(data, &PHASES) };
        for &budget in &budgets {
            cell(session, &mut report, &job, budget)?;
            // A sweep takes minutes: one that is stopped leaves what it has.
            if !report.rows.points.is_empty() {
                save(args, &report)?;
            }
        }
    }
    // The one figure of the contract: the smallest budget, the first kind of data.
    let smallest = |p: &&Point| p.budget == first && p.content == contents[0];
    let ours: Vec<&Point> =
        report.rows.points.iter().filter(smallest).filter(|p| p.name == SWAPTIDE).collect();
    let alone = ours.iter().find(|p| p.side.limit == first).map(|p| p.side.clone());
    let mut pairs = Vec::new();
    for peer in report.rows.points.iter().filter(smallest).filter(|p| p.name != SWAPTIDE) {
        let against = ours.iter().find(|p| p.against.as_ref().is_some_and(|b| b.0 == peer.name));
        if let Some(ours) = against {
            let (name, peer, swaptide) = (peer.name.clone(), peer.side.clone(), ours.side.clone());
            pairs.push(Pairing { name, peer, other: None, absent: None, swaptide });
        }
    }
    (report.unpaired.usual, report.pairs) = (alone, pairs);
    session.note_peers(&mut report);
    Ok(report)
}

fn cell(
    session: &Session<'_>,
    report: &mut BenchReport,
    job: &Workload,
    budget: u64,
) -> Result<(), Failed> {
    let machine = session.runner.restorer.machine();
    let mut bare = SideRuns::default();
    let mut against: Vec<PeerCell> = session.peers.iter().map(|_| PeerCell::default()).collect();
    let kind = format!("data {}:1", job.content.name());
    for run in 1..=session.runs {
        let at = |who: &str, ram| session.say(&format!("{kind}: {who}"), ram, run);
        at(SWAPTIDE, budget);
        match session.runner.swaptide(job, budget) {
            Ok(outcome) => bare.add(outcome.total_mb_per_s(), budget, &outcome),
            Err(e) => {
                report.failed.push(format!("{kind}, swaptide --ram {}: {e}", human(budget)));
                return Ok(());
            }
        }
        'peers: for (peer, against) in session.peers.iter().zip(&mut against) {
            let cgroups = peer.check(machine)?;
            let mut pool = u64::MAX;
            for (which, folios) in Folios::choices(machine).into_iter().enumerate() {
                at(&format!("{} {}", peer.name(), folios.name()), budget);
                let outcome = match session.runner.kernel(job, &cgroups, *peer, folios, budget) {
                    Ok(outcome) => outcome,
                    Err(e) => {
                        report.notes.push(format!(
                            "{kind}, {} in {}: {e}",
                            peer.name(),
                            human(budget)
                        ));
                        *against = PeerCell::default();
                        continue 'peers;
                    }
                };
                if against.theirs.len() <= which {
                    against.theirs.push((folios, SideRuns::default()));
                }
                against.theirs[which].1.add(outcome.total_mb_per_s(), budget, &outcome);
                pool = pool.min(if outcome.pool_inside { 0 } else { outcome.pool_bytes });
            }
            // A peer without a pool of its own had what swaptide has just had.
            if pool > 0 {
                at(SWAPTIDE, budget + pool);
                match session.runner.swaptide(job, budget + pool) {
                    Ok(outcome) => {
                        let ours = against.ours.get_or_insert_default();
                        ours.add(outcome.total_mb_per_s(), budget + pool, &outcome);
                    }
                    Err(e) => report
                        .failed
                        .push(format!("{kind}, swaptide --ram {}: {e}", human(budget + pool))),
                }
            }
        }
    }
    let mut bare = point(SWAPTIDE, job.content, budget, &bare, None)?;
    let mut points = Vec::new();
    for (peer, against) in session.peers.iter().zip(&against) {
        let median = |runs: &SideRuns| Spread::of(&runs.values).map_or(0.0, |s| s.median);
        let best = against.theirs.iter().max_by(|a, b| median(&a.1).total_cmp(&median(&b.1)));
        let Some((folios, theirs)) = best else { continue };
        let versus = |speed: f64| {
            Some((peer.name().to_owned(), Better::Higher.ratio(speed, median(theirs))))
        };
        match &against.ours {
            Some(ours) => {
                let mut ours = point(SWAPTIDE, job.content, budget, ours, None)?;
                ours.against = versus(ours.side.stats.median);
                points.push(ours);
            }
            None => bare.against = versus(bare.side.stats.median),
        }
        points.push(point(peer.name(), job.content, budget, theirs, Some(*folios))?);
    }
    report.rows.points.push(bare);
    report.rows.points.append(&mut points);
    Ok(())
}

fn point(
    name: &str,
    content: PageContent,
    budget: u64,
    runs: &SideRuns,
    folios: Option<Folios>,
) -> Result<Point, String> {
    let median = |values: Vec<f64>| Spread::of(&values).map(|s| s.median);
    let speed = |phase: Phase| {
        let of_run = |o: &RunOutcome| o.phase_mb_per_s(phase);
        median(runs.outcomes.iter().filter_map(of_run).collect()).map(|x| (phase, x))
    };
    Ok(Point {
        name: name.into(),
        content,
        budget,
        side: runs.side(folios)?,
        phases: PHASES.into_iter().filter_map(speed).collect(),
        wall_s: median(runs.outcomes.iter().map(|o| o.wall_s).collect()).unwrap_or(0.0),
        verified: runs.outcomes.iter().map(RunOutcome::verified_bytes).min().unwrap_or(0),
        capped: runs.outcomes.iter().any(RunOutcome::capped),
        against: None,
    })
}
