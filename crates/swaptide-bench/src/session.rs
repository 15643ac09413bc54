//! One call of `swaptide bench`: the runs of each side, and the report that they go into.
//!
//! A peer's runs and swaptide's alternate, so that a machine that grows slower or faster meanwhile
//! does so for both.
//!
//! What is held equal: the program, its data, and the memory. The kernel does not charge zram's
//! pool to the memory cgroup (nor zswap's, in version 1), while swaptide's budget covers its pool;
//! so swaptide gets the cgroup's limit plus what the peer's pool took in the run just before, and
//! no more.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::args::BenchArgs;
use crate::output::{is_stdout, print_titled};
use crate::peers::cgroup::Hierarchy;
use crate::peers::kernel::{self, Folios, KernelPeer};
use crate::report::comparison::{
    BenchReport, Better, Pairing, Rows, SWAPTIDE, Side, Spread, Unpaired, human,
};
use crate::report::svg;
use crate::run::{RunOutcome, Runner, Workload};
use crate::workload::phases::{PAGE, PageContent, Phase};

/// Why a benchmark ended without a result: the exit status and the line to print.
pub(crate) struct Failed(pub(crate) u8, pub(crate) String);

impl From<String> for Failed {
    fn from(message: String) -> Self {
        Failed(1, message)
    }
}

/// Prints the report, and writes what the flags ask for.
pub(crate) fn publish(args: &BenchArgs, report: &BenchReport) -> Result<(), Failed> {
    if args.json.as_deref().is_some_and(is_stdout) {
        let _ = writeln!(std::io::stdout(), "{:#}", report.json());
    } else {
        print_titled(&report.text());
    }
    save(args, report)
}

/// Writes what the flags ask for.
pub(crate) fn save(args: &BenchArgs, report: &BenchReport) -> Result<(), Failed> {
    let write = |file: &Path, text: String| {
        std::fs::write(file, text)
            .map_err(|e| Failed(1, format!("writing {}: {e}", file.display())))
    };
    if let Some(file) = args.json.as_ref().filter(|file| !is_stdout(file)) {
        write(file, format!("{:#}\n", report.json()))?;
    }
    if let Some(file) = &args.svg {
        write(file, svg::draw(report)?)?;
    }
    Ok(())
}

/// Runs of a kernel peer that may fail: where many pages are to go out at a time it sometimes finds
/// its cgroup out of memory.
const TRIES: u32 = 3;

pub(crate) struct Session<'a> {
    pub(crate) args: &'a BenchArgs,
    pub(crate) runs: u32,
    pub(crate) ram: u64,
    pub(crate) peers: Vec<KernelPeer>,
    pub(crate) runner: Runner,
}

/// One side's runs, as they come in.
#[derive(Default)]
pub(crate) struct SideRuns {
    pub(crate) values: Vec<f64>,
    pub(crate) outcomes: Vec<RunOutcome>,
    limits: Vec<f64>,
    pools: Vec<f64>,
    resident: Option<u64>,
    codec: Option<String>,
    pool_inside: bool,
    failed: u32,
    gave_up: Option<String>,
}

impl SideRuns {
    pub(crate) fn add(&mut self, value: f64, limit: u64, outcome: &RunOutcome) {
        self.values.push(value);
        self.limits.push(limit as f64);
        self.pools.push(outcome.pool_bytes as f64);
        self.resident = self.resident.max(outcome.peak_resident);
        self.codec.clone_from(&outcome.codec);
        self.pool_inside = outcome.pool_inside;
        self.outcomes.push(outcome.clone());
    }

    pub(crate) fn side(&self, folios: Option<Folios>) -> Result<Side, String> {
        let stats = Spread::of(&self.values).ok_or("nothing was measured")?;
        let median = |values: &[f64]| Spread::of(values).map_or(0, |s| s.median as u64);
        let words: Vec<&str> =
            self.codec.as_deref().into_iter().chain(folios.map(Folios::name)).collect();
        let detail = words.join(" ");
        let failed = self.failed;
        let (limit, pool, pool_inside) =
            (median(&self.limits), median(&self.pools), self.pool_inside);
        let written: Vec<f64> =
            self.outcomes.iter().map(|o| (o.written_pages * PAGE as u64) as f64).collect();
        Ok(Side {
            stats,
            limit,
            pool,
            resident: self.resident,
            pool_inside,
            detail,
            written: median(&written),
            failed,
        })
    }
}

/// The runs of a peer and of swaptide.
pub(crate) struct Alternated {
    /// With each size of folio; at least one came to its end.
    pub(crate) theirs: Vec<(Folios, SideRuns)>,
    pub(crate) ours: SideRuns,
}

impl Session<'_> {
    pub(crate) fn job(&self, data: u64, phases: &[Phase]) -> Workload {
        let (touches, seconds_cap) =
            (self.args.touches.unwrap_or(60_000), self.args.seconds_cap.unwrap_or(300));
        let content = self.args.ratio.first().copied().unwrap_or(PageContent::Four);
        // Nothing may be pushed out to the file: zswap stands for the compressed cache.
        Workload {
            data,
            content,
            phases: phases.to_vec(),
            repeat: 1,
            touches,
            seconds_cap,
            threads: 1,
            latency: false,
            zswap_percent: 50,
            settle: Duration::ZERO,
            look: false,
        }
    }

    /// The runs of `peer` with each size of folio and of swaptide, in turns.
    pub(crate) fn alternate(
        &self,
        peer: KernelPeer,
        job: &Workload,
        limit: u64,
        value: &dyn Fn(&RunOutcome) -> Result<f64, String>,
    ) -> Result<Alternated, Failed> {
        let machine = self.runner.restorer.machine();
        let cgroups = peer.check(machine)?;
        let choices = Folios::choices(machine);
        let mut theirs: Vec<SideRuns> = choices.iter().map(|_| SideRuns::default()).collect();
        let mut ours = SideRuns::default();
        for run in 1..=self.runs {
            let mut pool = u64::MAX;
            for (folios, runs) in
                choices.iter().zip(&mut theirs).filter(|(_, runs)| runs.gave_up.is_none())
            {
                self.say(&format!("{} {}", peer.name(), folios.name()), limit, run);
                let outcome = loop {
                    match self.runner.kernel(job, &cgroups, peer, *folios, limit) {
                        Ok(outcome) => break outcome,
                        Err(e) if runs.failed == TRIES => {
                            runs.gave_up = Some(e);
                            break RunOutcome::default();
                        }
                        Err(_) => runs.failed += 1,
                    }
                };
                if runs.gave_up.is_some() {
                    continue;
                }
                runs.add(value(&outcome)?, limit, &outcome);
                pool = pool.min(if outcome.pool_inside { 0 } else { outcome.pool_bytes });
            }
            // The kernel may kill a workload for one folio size that it carries with the other: the
            // other is the comparison then.
            if let (Some(e), true) = (
                theirs.iter().find_map(|runs| runs.gave_up.clone()),
                theirs.iter().all(|runs| runs.gave_up.is_some()),
            ) {
                return Err(e.into());
            }
            let ram = limit + pool;
            self.say(SWAPTIDE, ram, run);
            let outcome = self.runner.swaptide(job, ram)?;
            ours.add(value(&outcome)?, ram, &outcome);
        }
        Ok(Alternated { theirs: choices.into_iter().zip(theirs).collect(), ours })
    }

    /// The comparison with `peer`, and whether a phase was cut short.
    fn compare_with(
        &self,
        peer: KernelPeer,
        job: &Workload,
        limit: u64,
        better: Better,
        value: &dyn Fn(&RunOutcome) -> Result<f64, String>,
    ) -> Result<(Pairing, bool), Failed> {
        let Alternated { theirs, ours } = self.alternate(peer, job, limit, value)?;
        let mut sides = Vec::new();
        let mut absent = None;
        for (folios, runs) in &theirs {
            match &runs.gave_up {
                None => sides.push(runs.side(Some(*folios))?),
                Some(e) => {
                    absent = Some(format!(
                        "with {} it never finished in {} tries ({e})",
                        folios.name(),
                        TRIES + 1
                    ))
                }
            }
        }
        sides.sort_by(|a, b| b.stats.median.total_cmp(&a.stats.median));
        if better == Better::Lower {
            sides.reverse();
        }
        let mut sides = sides.into_iter();
        let peer_side = sides.next().ok_or_else(|| Failed(1, "no folio size to measure".into()))?;
        let runs = theirs.iter().map(|(_, runs)| runs).chain([&ours]);
        let capped = runs.flat_map(|r| &r.outcomes).any(RunOutcome::capped);
        let pair = Pairing {
            name: peer.name().into(),
            peer: peer_side,
            other: sides.next(),
            absent,
            swaptide: ours.side(None)?,
        };
        Ok((pair, capped))
    }

    /// Compares with each peer, or measures swaptide alone where there is none. Gives the peers of
    /// which, or of swaptide against which, a phase was cut short.
    pub(crate) fn compare(
        &self,
        report: &mut BenchReport,
        job: &Workload,
        value: &dyn Fn(&RunOutcome) -> Result<f64, String>,
    ) -> Result<Vec<KernelPeer>, Failed> {
        let mut cut_short = Vec::new();
        for &peer in &self.peers {
            let (pair, capped) = self.compare_with(peer, job, self.ram, report.better, value)?;
            report.pairs.push(pair);
            cut_short.extend(capped.then_some(peer));
        }
        if self.peers.is_empty() {
            report.unpaired.usual = Some(self.ours(job, self.ram, value)?.side(None)?);
        }
        Ok(cut_short)
    }

    pub(crate) fn ours(
        &self,
        job: &Workload,
        ram: u64,
        value: &dyn Fn(&RunOutcome) -> Result<f64, String>,
    ) -> Result<SideRuns, Failed> {
        let mut runs = SideRuns::default();
        for run in 1..=self.runs {
            self.say(SWAPTIDE, ram, run);
            let outcome = self.runner.swaptide(job, ram)?;
            runs.add(value(&outcome)?, ram, &outcome);
        }
        Ok(runs)
    }

    /// Publishes what was measured so far if a signal ends the benchmark.
    pub(crate) fn publish_at_interrupt(&self, report: &BenchReport) {
        let (args, mut report) = (self.args.clone(), report.clone());
        report.notes.push("interrupted: the rows that were measured before".into());
        let end = self.runner.progress.ender();
        self.runner.restorer.at_interrupt(move || {
            end();
            if let Err(Failed(_, message)) = publish(&args, &report) {
                eprintln!("swaptide bench: {message}");
            }
        });
    }

    /// Runs of all peers, each with every size of folio and swaptide's next to it, in one turn.
    fn runs_with_peers(&self) -> u64 {
        let sides = Folios::choices(self.runner.restorer.machine()).len() as u64 + 1;
        self.peers.len() as u64 * sides
    }

    /// The same in all turns.
    pub(crate) fn steps_with_peers(&self) -> u64 {
        u64::from(self.runs) * self.runs_with_peers()
    }

    /// The runs of a comparison, or of swaptide alone without peers.
    pub(crate) fn steps_of_comparison(&self) -> u64 {
        u64::from(self.runs) * self.runs_with_peers().max(1)
    }

    /// Says how many runs there will be; fewer where a side gives up.
    pub(crate) fn expect(&self, steps: u64) {
        self.runner.progress.expect(steps, steps);
    }

    pub(crate) fn say(&self, who: &str, ram: u64, run: u32) {
        self.runner.say(&format!("{who}, {}: run {run} of {}", human(ram), self.runs));
    }

    pub(crate) fn report(
        &self,
        name: &str,
        title: &str,
        unit: &str,
        better: Better,
        data: u64,
    ) -> BenchReport {
        let machine = self.runner.restorer.machine();
        let kernel = machine.read("/proc/sys/kernel/osrelease").unwrap_or_default();
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        let cpuinfo = machine.read("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo
            .lines()
            .find_map(|l| l.strip_prefix("model name")?.split_once(": "))
            .map(|x| x.1.to_owned());
        let meminfo = machine.read("/proc/meminfo").unwrap_or_default();
        let kib = meminfo.lines().find_map(|l| {
            l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        });
        let load = machine
            .read("/proc/loadavg")
            .unwrap_or_default()
            .split(' ')
            .next()
            .and_then(|l| l.parse::<f64>().ok());
        let cgroup = Hierarchy::find(machine).ok().map(|h| h.version());
        BenchReport {
            name: name.into(),
            title: format!("{title}; Linux {kernel}, {cpus} CPUs"),
            unit: unit.into(),
            better,
            budget: self.ram,
            data,
            runs: self.runs,
            unpaired: Unpaired::default(),
            pairs: vec![],
            rows: Rows::default(),
            machine: json!({
                "kernel": kernel, "cpu": cpu, "cpus": cpus, "memory_bytes": kib.map(|k| k * 1024),
                "cgroup_version": cgroup, "load_before": load,
            }),
            notes: vec![],
            failed: vec![],
        }
    }

    /// What a reader of the comparison must know about the kernel's side.
    pub(crate) fn note_peers(&self, report: &mut BenchReport) {
        let machine = self.runner.restorer.machine();
        let mut sides =
            report.pairs.iter().map(|p| &p.peer).chain(report.rows.points.iter().map(|p| &p.side));
        if sides.any(|s| s.detail.starts_with("lzo") || s.detail.starts_with("zstd")) {
            report.notes.push(
                "this kernel has no lz4 for one of the peers: its row names the codec it used"
                    .into(),
            );
        }
        for pair in &report.pairs {
            let failed = pair.peer.failed + pair.other.as_ref().map_or(0, |side| side.failed);
            if failed > 0 {
                let text =
                    format!("{}: {failed} runs more did not finish, and do not count", pair.name);
                report.notes.push(text);
            }
        }
        for pair in &report.pairs {
            report
                .notes
                .extend(pair.absent.iter().map(|absent| format!("{}: {absent}", pair.name)));
        }
        if !self.peers.is_empty() && kernel::zswap_was_on(machine) {
            let text = "zswap was on in this boot: until a reboot the kernel swaps 64K folios out, \
                but in only as 4K pages";
            report.notes.push(text.into());
        }
    }
}

/// Two sides of which neither is a kernel peer.
pub(crate) fn uncontested(name: &str, other: Side, ours: Side) -> Pairing {
    Pairing { name: name.into(), peer: other, other: None, absent: None, swaptide: ours }
}
