//! `swaptide bench`: swaptide beside the kernel's own swap, measured in one call.
//!
//! Owns the command line, the order of the runs and which numbers go into the report. A peer's runs
//! and swaptide's alternate, so that a machine that grows slower or faster meanwhile does so for
//! both.
//!
//! What is held equal: the program, its data, and the memory. The kernel does not charge zram's
//! pool to the memory cgroup (nor zswap's, in version 1), while swaptide's budget covers its pool;
//! so swaptide gets the cgroup's limit plus what the peer's pool took in the run just before, and
//! no more.

mod cgroup;
mod costs;
mod peers;
mod phases;
mod points;
mod redis;
mod report;
mod restore;
pub mod run;
mod side;
mod svg;
mod sweep;
pub mod workload;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use swaptide_host::units::{SizeError, parse_bytes};

use peers::Held;
use peers::{Folios, Peer};
use report::{Better, Pairing, Report, SWAPTIDE, Side, Stats, human};
use restore::{Machine, Restorer};
use run::{Job, Outcome, Runner};
use workload::{Content, Phase};

/// Arguments of `swaptide bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    pub name: Name,
    /// What to compare with; may be given several times [default: kernel-zram for root in fill, seq
    /// and random, else none]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub peer: Vec<PeerArg>,
    /// Runs of each side [default: 3; 1 for sweep]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: Option<u32>,
    /// Memory allowed [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub ram: Option<u64>,
    /// The budgets of a sweep, separated by commas [default:
    /// 64M,96M,128M,192M,256M,384M,512M,768M,1G]
    #[arg(long, value_name = "SIZES", value_parser = size, value_delimiter = ',')]
    pub budgets: Vec<u64>,
    /// How far lz4 shrinks the data: 4 to 1, 2 to 1 as a heap, hardly; several for a sweep
    /// [default: 4; all for sweep]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub ratio: Vec<Content>,
    /// Data of the workload [default: 1G; 2G for sweep, half of --ram for within]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub data: Option<u64>,
    /// Touches in a random phase [default: 60000; 20000 for sweep; all pages for again]
    #[arg(long)]
    pub touches: Option<usize>,
    /// End a phase after this many seconds [default: 300; 60 for sweep]
    #[arg(long)]
    pub seconds_cap: Option<u64>,
    /// Measure swaptide also with the bare budget: its pool inside what the kernel has for resident
    /// pages alone
    #[arg(long)]
    pub strict_budget: bool,
    /// Where a kernel peer's swap file is made
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub swap_dir: PathBuf,
    /// Write the result as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw the result
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// The benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Growth: writing new memory while older memory goes out
    Fill,
    /// Refault in order
    Seq,
    /// Refault of 4K pages without locality
    Random,
    /// Refault of all pages without locality, in the order in which they were touched before
    Again,
    /// A program that fits its budget, with and without swaptide
    Within,
    /// Starting `true`, with and without swaptide
    Startup,
    /// More than compressed memory holds: growth, refault in order and at random while it is
    /// written back to a file
    Pressure,
    /// How many pages compressed memory holds in one page of RAM, when nothing was touched for 10 s
    Pool,
    /// Throughput of one job against its budget
    Sweep,
    /// A file alone as swap space: encrypted, and with `cipher=none`
    Cipher,
    /// A fork with all data swapped out, and without swaptide with all data resident
    Fork,
    /// How long a Redis server takes to write its dump in the background, half of it swapped out
    Bgsave,
}

/// A choice of peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PeerArg {
    /// Compressed RAM as the swap device
    KernelZram,
    /// A compressed cache before a swap file
    KernelZswap,
    /// A plain swap file
    KernelFile,
    /// swaptide alone
    None,
    /// Every kernel peer
    All,
}

/// Why a benchmark ended without a result: the exit status and the line to print.
struct Failure(u8, String);

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Failure(1, message)
    }
}

/// Runs the benchmark. Exit status: 0, 1 where a run failed, 2 for bad input or a peer that cannot
/// be set up here.
pub fn main(args: &BenchArgs) -> u8 {
    match bench(args) {
        Ok(()) => 0,
        Err(Failure(status, message)) => {
            eprintln!("swaptide bench: {message}");
            status
        }
    }
}

fn bench(args: &BenchArgs) -> Result<(), Failure> {
    for (flag, file) in [("--json", &args.json), ("--svg", &args.svg)] {
        // Found out now, not after minutes of measuring.
        if let Some(file) = file {
            let open = std::fs::OpenOptions::new().create(true).append(true).open(file);
            open.map_err(|e| Failure(2, format!("{flag} {}: {e}", file.display())))?;
        }
    }
    if !args.swap_dir.is_dir() {
        return Err(Failure(2, format!("--swap-dir {}: not a directory", args.swap_dir.display())));
    }
    let sweeps = args.name == Name::Sweep;
    let flags = [
        (sweeps && args.ram.is_some(), "--ram: a sweep takes its budgets from --budgets"),
        (sweeps && args.strict_budget, "--strict-budget: a sweep measures the bare budget anyway"),
        (!sweeps && !args.budgets.is_empty(), "--budgets: only for sweep; give --ram SIZE"),
        (!sweeps && args.ratio.len() > 1, "--ratio: several only for sweep"),
    ];
    if let Some((_, message)) = flags.iter().find(|(wrong, _)| *wrong) {
        return Err(Failure(2, (*message).into()));
    }
    let machine = Machine::real();
    let peers = chosen_peers(args, &machine)?;
    let restorer = Restorer::new(machine);
    restorer.watch_signals()?;
    let runs = args.runs.unwrap_or(if sweeps { 1 } else { 3 });
    let ram = args.ram.unwrap_or(256 << 20);
    let bench = Bench { args, runs, ram, peers, runner: Runner::new(restorer, &args.swap_dir)? };
    let report = match args.name {
        Name::Fill => bench.memory(Phase::Fill, &[Phase::Fill]),
        Name::Seq => bench.memory(Phase::Seq, &[Phase::Fill, Phase::Seq]),
        Name::Random => bench.memory(Phase::Random, &[Phase::Fill, Phase::Random]),
        Name::Again => bench.memory(Phase::Again, &[Phase::Fill, Phase::Random, Phase::Again]),
        Name::Pressure => bench.pressure(),
        Name::Pool => bench.pool(),
        Name::Within => bench.within(),
        Name::Startup => bench.startup(),
        Name::Sweep => bench.sweep(),
        Name::Cipher => bench.cipher(),
        Name::Fork => bench.fork(),
        Name::Bgsave => bench.bgsave(),
    };
    bench.runner.say("");
    let report = report?;
    // A reader that went away (a closed pipe) is no reason to lose the files below.
    let _ = std::io::stdout().write_all(report.text().as_bytes());
    save(args, &report)?;
    if !report.failed.is_empty() {
        return Err(Failure(1, report.failed.join("; ")));
    }
    Ok(())
}

/// Writes what the flags ask for.
fn save(args: &BenchArgs, report: &Report) -> Result<(), Failure> {
    let write = |file: &Path, text: String| {
        std::fs::write(file, text)
            .map_err(|e| Failure(1, format!("writing {}: {e}", file.display())))
    };
    if let Some(file) = &args.json {
        write(file, format!("{:#}\n", report.json()))?;
    }
    if let Some(file) = &args.svg {
        write(file, svg::draw(report)?)?;
    }
    Ok(())
}

/// The peers asked for that can be had. With `all`, one that cannot is named and left out; asked
/// for by name, it ends the call.
fn chosen_peers(args: &BenchArgs, machine: &Machine) -> Result<Vec<Peer>, Failure> {
    let alone = [Name::Within, Name::Startup, Name::Cipher, Name::Fork];
    let compares = !alone.contains(&args.name);
    let kernel = |p: &&PeerArg| **p != PeerArg::None;
    if !compares && args.peer.iter().any(|p| kernel(&p)) {
        return Err(Failure(
            2,
            "--peer: this benchmark compares nothing with the kernel's swap".into(),
        ));
    }
    if args.peer.is_empty() && args.name != Name::Sweep && compares {
        let usual =
            if matches!(args.name, Name::Pressure | Name::Pool) { Peer::Zswap } else { Peer::Zram };
        return match usual.check(machine) {
            Ok(_) => Ok(vec![usual]),
            Err(e) => {
                eprintln!(
                    "swaptide bench: no comparison with the kernel: --peer {}: {e}",
                    usual.name()
                );
                Ok(vec![])
            }
        };
    }
    let all = args.peer.contains(&PeerArg::All);
    let mut chosen = Vec::new();
    for peer in Peer::ALL {
        let named = match peer {
            Peer::Zram => PeerArg::KernelZram,
            Peer::File => PeerArg::KernelFile,
            Peer::Zswap => PeerArg::KernelZswap,
        };
        let named = args.peer.contains(&named);
        match peer.check(machine) {
            _ if !all && !named => {}
            _ if args.name == Name::Pool && peer == Peer::File => {
                if named {
                    return Err(Failure(
                        2,
                        format!("--peer {}: it has no compressed memory", peer.name()),
                    ));
                }
            }
            Ok(_) => chosen.push(peer),
            Err(e) if named => return Err(Failure(2, format!("--peer {}: {e}", peer.name()))),
            Err(e) => eprintln!("swaptide bench: left out: --peer {}: {e}", peer.name()),
        }
    }
    if all && chosen.is_empty() {
        return Err(Failure(2, "--peer all: no kernel peer can be set up here".into()));
    }
    Ok(chosen)
}

/// Runs of a kernel peer that may fail: where many pages are to go out at a time it sometimes finds
/// its cgroup out of memory.
const TRIES: u32 = 3;

struct Bench<'a> {
    args: &'a BenchArgs,
    runs: u32,
    ram: u64,
    peers: Vec<Peer>,
    runner: Runner,
}

/// One side's runs, as they come in.
#[derive(Default)]
struct Runs {
    values: Vec<f64>,
    outcomes: Vec<Outcome>,
    limits: Vec<f64>,
    pools: Vec<f64>,
    resident: Option<u64>,
    codec: Option<String>,
    pool_inside: bool,
    failed: u32,
    gave_up: Option<String>,
}

impl Runs {
    fn add(&mut self, value: f64, limit: u64, outcome: &Outcome) {
        self.values.push(value);
        self.limits.push(limit as f64);
        self.pools.push(outcome.pool_bytes as f64);
        self.resident = self.resident.max(outcome.peak_resident);
        self.codec.clone_from(&outcome.codec);
        self.pool_inside = outcome.pool_inside;
        self.outcomes.push(outcome.clone());
    }

    fn side(&self, folios: Option<Folios>) -> Result<Side, String> {
        let stats = Stats::of(&self.values).ok_or("nothing was measured")?;
        let median = |values: &[f64]| Stats::of(values).map_or(0, |s| s.median as u64);
        let words: Vec<&str> =
            self.codec.as_deref().into_iter().chain(folios.map(Folios::name)).collect();
        let detail = words.join(" ");
        let failed = self.failed;
        let (limit, pool, pool_inside) =
            (median(&self.limits), median(&self.pools), self.pool_inside);
        let written: Vec<f64> = self
            .outcomes
            .iter()
            .map(|o| (o.written_pages * workload::PAGE as u64) as f64)
            .collect();
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

impl Bench<'_> {
    fn job(&self, data: u64, phases: &[Phase]) -> Job {
        let (touches, seconds_cap) =
            (self.args.touches.unwrap_or(60_000), self.args.seconds_cap.unwrap_or(300));
        let content = self.args.ratio.first().copied().unwrap_or(Content::Four);
        // Nothing may be pushed out to the file: zswap stands for the compressed cache.
        Job {
            data,
            content,
            phases: phases.to_vec(),
            repeat: 1,
            touches,
            seconds_cap,
            zswap_percent: 50,
            settle: Duration::ZERO,
            look: false,
        }
    }

    /// One phase's throughput, with as much data as asked for.
    fn memory(&self, phase: Phase, phases: &[Phase]) -> Result<Report, Failure> {
        let (args, name) = (self.args, phase.name());
        let data = args.data.unwrap_or(1 << 30);
        let mut job = self.job(data, phases);
        if phase == Phase::Again {
            // What is touched once more must not still be there.
            job.touches = args.touches.unwrap_or(data as usize / workload::PAGE);
        }
        let value = |o: &Outcome| {
            o.phase_mb_per_s(phase).ok_or(format!("the {name} phase did not come to its end"))
        };
        let title = format!(
            "{} of data {} in {}, {} runs",
            human(data),
            job.content.describe(),
            human(self.ram),
            self.runs
        );
        let mut report = self.report(name, &title, "MB/s", Better::Higher, data);
        for &peer in &self.peers {
            let (pair, capped) = self.beside(peer, &job, self.ram, Better::Higher, &value)?;
            report.pairs.push(pair);
            if capped {
                report.notes.push(format!(
                    "{}: a phase was cut short after {} s",
                    peer.name(),
                    job.seconds_cap
                ));
            }
        }
        if self.peers.is_empty() {
            report.alone = Some(self.ours(&job, self.ram, &value)?.side(None)?);
        }
        if args.strict_budget {
            report.strict = Some(self.ours(&job, self.ram, &value)?.side(None)?);
        }
        self.note_peers(&mut report);
        Ok(report)
    }

    /// All phases of a job whose data does not fit compressed memory, so that it goes on to a file:
    /// the kernel's zswap may take a hundredth of the machine's memory, which is the least that it
    /// can be told.
    fn pressure(&self) -> Result<Report, Failure> {
        let data = self.args.data.unwrap_or(2 << 30);
        let content = self.args.ratio.first().copied().unwrap_or(Content::Two);
        let job = Job {
            content,
            zswap_percent: 1,
            ..self.job(data, &[Phase::Fill, Phase::Seq, Phase::Random])
        };
        let value = |o: &Outcome| {
            if o.ended {
                Err("the job did not come to its end".to_owned())
            } else {
                Ok(o.total_mb_per_s())
            }
        };
        let title = format!(
            "{} of data {} in {}, {} runs",
            human(data),
            content.describe(),
            human(self.ram),
            self.runs
        );
        let mut report = self.report("pressure", &title, "MB/s", Better::Higher, data);
        for &peer in &self.peers {
            let (pair, capped) = self.beside(peer, &job, self.ram, Better::Higher, &value)?;
            let written = |side: &Side| human(side.written);
            let (theirs, ours) = (written(&pair.peer), written(&pair.swaptide));
            report.notes.push(format!(
                "written to the file in a run, median: {} {theirs}, swaptide {ours}",
                peer.name()
            ));
            report.pairs.push(pair);
            if capped {
                report.notes.push(format!(
                    "{}: a phase was cut short after {} s",
                    peer.name(),
                    job.seconds_cap
                ));
            }
        }
        if self.peers.is_empty() {
            report.alone = Some(self.ours(&job, self.ram, &value)?.side(None)?);
        }
        self.note_peers(&mut report);
        Ok(report)
    }

    /// How much less RAM pages take, when there was time to do something for it.
    fn pool(&self) -> Result<Report, Failure> {
        const SETTLE: Duration = Duration::from_secs(10);
        let data = self.args.data.unwrap_or(1 << 30);
        let content = self.args.ratio.first().copied().unwrap_or(Content::Two);
        let job = Job { content, settle: SETTLE, look: true, ..self.job(data, &[Phase::Fill]) };
        let value = |o: &Outcome| match o.held {
            Held { ram: 1.., pages: 1.., .. } => Ok(o.held.pages as f64 / o.held.ram as f64),
            _ => Err("nothing was in compressed memory at the end".to_owned()),
        };
        let title = format!(
            "{} of data {} in {}, {} runs",
            human(data),
            content.describe(),
            human(self.ram),
            self.runs
        );
        let mut report = self.report("pool", &title, "x", Better::Higher, data);
        for &peer in &self.peers {
            report.pairs.push(self.beside(peer, &job, self.ram, Better::Higher, &value)?.0);
        }
        if self.peers.is_empty() {
            report.alone = Some(self.ours(&job, self.ram, &value)?.side(None)?);
        }
        report.notes.push(
            "x: pages in compressed memory for each page of RAM that it takes, 10 s \
            after the last touch"
                .into(),
        );
        report.notes.push("of swaptide the column `pool` is the most it had".into());
        self.note_peers(&mut report);
        Ok(report)
    }

    /// The runs of `peer` and of swaptide, in turns.
    fn beside(
        &self,
        peer: Peer,
        job: &Job,
        limit: u64,
        better: Better,
        value: &dyn Fn(&Outcome) -> Result<f64, String>,
    ) -> Result<(Pairing, bool), Failure> {
        let machine = self.runner.restorer.machine();
        let cgroups = peer.check(machine)?;
        let choices = Folios::choices(machine);
        let mut theirs: Vec<Runs> = choices.iter().map(|_| Runs::default()).collect();
        let mut ours = Runs::default();
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
                            break Outcome::default();
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
        let mut sides = Vec::new();
        let mut absent = None;
        for (folios, runs) in choices.iter().zip(&theirs) {
            match &runs.gave_up {
                None => sides.push(runs.side(Some(*folios))?),
                Some(e) => {
                    absent = Some(format!(
                        "with {} it never came to its end in {} tries ({e})",
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
        let peer_side =
            sides.next().ok_or_else(|| Failure(1, "no folio size to measure".into()))?;
        let capped = theirs.iter().chain([&ours]).flat_map(|r| &r.outcomes).any(Outcome::capped);
        let pair = Pairing {
            name: peer.name().into(),
            peer: peer_side,
            other: sides.next(),
            absent,
            swaptide: ours.side(None)?,
        };
        Ok((pair, capped))
    }

    fn ours(
        &self,
        job: &Job,
        ram: u64,
        value: &dyn Fn(&Outcome) -> Result<f64, String>,
    ) -> Result<Runs, Failure> {
        let mut runs = Runs::default();
        for run in 1..=self.runs {
            self.say(SWAPTIDE, ram, run);
            let outcome = self.runner.swaptide(job, ram)?;
            runs.add(value(&outcome)?, ram, &outcome);
        }
        Ok(runs)
    }

    /// The same work with and without swaptide, in a budget it never fills.
    fn within(&self) -> Result<Report, Failure> {
        let args = self.args;
        let data = args.data.unwrap_or(self.ram / 2);
        if data > self.ram / 4 * 3 {
            return Err(Failure(
                2,
                format!("--data {}: does not fit in --ram {}", human(data), human(self.ram)),
            ));
        }
        // About three seconds of writing, checking every word, and jumping about.
        let repeat = (8 * (1u64 << 30) / data).clamp(1, 10_000) as u32;
        let job = Job { repeat, ..self.job(data, &[Phase::Fill, Phase::Verify, Phase::Random]) };
        let (mut without, mut with) = (Runs::default(), Runs::default());
        for run in 1..=self.runs {
            self.say("without swaptide", self.ram, run);
            let outcome = self.runner.plain(&job)?;
            without.add(outcome.wall_s, 0, &outcome);
            self.say(SWAPTIDE, self.ram, run);
            let outcome = self.runner.swaptide(&job, self.ram)?;
            with.add(outcome.wall_s, self.ram, &outcome);
        }
        let title = format!(
            "{} of data in a budget of {}, {} runs",
            human(data),
            human(self.ram),
            self.runs
        );
        let mut report = self.report("within", &title, "s", Better::Lower, data);
        let (least, ours) = (without.side(None)?.stats.min, with.side(None)?.stats.min);
        report.notes.push(format!(
            "ratio of the fastest runs, which a busy machine disturbs least: {:.3}",
            least / ours
        ));
        report.pairs.push(beside_itself("without-swaptide", without.side(None)?, with.side(None)?));
        Ok(report)
    }

    /// What starting a program costs.
    fn startup(&self) -> Result<Report, Failure> {
        const STARTS: u32 = 20;
        let program =
            ["/usr/bin/true", "/bin/true"].map(Path::new).into_iter().find(|p| p.is_file());
        let program = program.ok_or_else(|| Failure(1, "there is no /usr/bin/true here".into()))?;
        let (mut without, mut with) = (Runs::default(), Runs::default());
        for run in 1..=self.runs * STARTS {
            self.say("starting", self.ram, run.div_ceil(STARTS));
            without.add(self.runner.time_program(program, None)? * 1e3, 0, &Outcome::default());
            with.add(
                self.runner.time_program(program, Some(self.ram))? * 1e3,
                self.ram,
                &Outcome::default(),
            );
        }
        let title = format!("{} starts of true", self.runs * STARTS);
        let mut report = self.report("startup", &title, "ms", Better::Lower, 0);
        report.pairs.push(beside_itself("without-swaptide", without.side(None)?, with.side(None)?));
        Ok(report)
    }

    fn say(&self, who: &str, ram: u64, run: u32) {
        self.runner.say(&format!("{who}, {}: run {run} of {}", human(ram), self.runs));
    }

    fn report(&self, name: &str, title: &str, unit: &str, better: Better, data: u64) -> Report {
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
        let cgroup = cgroup::Hierarchy::find(machine).ok().map(|h| h.version());
        Report {
            name: name.into(),
            title: format!("{title}; Linux {kernel}, {cpus} CPUs"),
            unit: unit.into(),
            better,
            budget: self.ram,
            data,
            runs: self.runs,
            alone: None,
            strict: None,
            pairs: vec![],
            points: vec![],
            machine: json!({
                "kernel": kernel, "cpu": cpu, "cpus": cpus, "memory_bytes": kib.map(|k| k * 1024),
                "cgroup_version": cgroup, "load_before": load,
            }),
            notes: vec![],
            failed: vec![],
        }
    }

    /// What a reader of the comparison must know about the kernel's side.
    fn note_peers(&self, report: &mut Report) {
        let machine = self.runner.restorer.machine();
        let mut sides =
            report.pairs.iter().map(|p| &p.peer).chain(report.points.iter().map(|p| &p.side));
        if sides.any(|s| s.detail.starts_with("lzo") || s.detail.starts_with("zstd")) {
            report.notes.push(
                "this kernel has no lz4 for one of the peers: its row names the codec it used"
                    .into(),
            );
        }
        for pair in &report.pairs {
            let failed = pair.peer.failed + pair.other.as_ref().map_or(0, |side| side.failed);
            if failed > 0 {
                let text = format!(
                    "{}: {failed} runs more did not come to their end, and do not count",
                    pair.name
                );
                report.notes.push(text);
            }
        }
        for pair in &report.pairs {
            report
                .notes
                .extend(pair.absent.iter().map(|absent| format!("{}: {absent}", pair.name)));
        }
        if !self.peers.is_empty() && peers::zswap_was_on(machine) {
            let text = "zswap was on in this boot: until a reboot the kernel swaps 64K folios out, \
                but in only as 4K pages";
            report.notes.push(text.into());
        }
    }
}

/// Two sides of which neither is a kernel peer.
fn beside_itself(name: &str, other: Side, ours: Side) -> Pairing {
    Pairing { name: name.into(), peer: other, other: None, absent: None, swaptide: ours }
}

/// A size on the command line.
pub fn size(text: &str) -> Result<u64, SizeError> {
    parse_bytes(text)
}
