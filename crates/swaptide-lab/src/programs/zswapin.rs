//! `swaptide lab zswapin`: how much comes in for a fault, under the real engine.
//!
//! Owns the cases and their runs. Every case runs the same program on two sides, in turns: where
//! every fault brings its page alone (order 0), and with the policy as it is. Counters are those of
//! the phase in which the target is touched, asked of the run itself before and after.
//!
//! Where both sides are to do the same (touches without order), they take turns within one run: two
//! runs differ by more than a hundredth by themselves, by where their memory lies and on which CPUs
//! they are.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::context::Lab;
use crate::report::{Curve, LabReport, Plot, Row};
use swaptide_host::control::client;

use crate::programs::pairs::{deviation, mean, middle_of, ratio_row, ratios};
use crate::programs::work::{READY, Touched};
use swaptide_bench::{Lines, Next};

const MIB: f64 = (1 << 20) as f64;
/// The least a run needs.
const MIN_RAM_BYTES: u64 = 24 << 20;
/// Nothing here takes longer, even on a machine with much else to do.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);

/// The parameters of the experiment.
pub(crate) struct ZswapinPlan {
    /// Runs of each side.
    pub runs: u32,
    /// Times that a run pushes its target out and touches it.
    pub rounds: u32,
    /// Part of the published sizes.
    pub scale: f64,
    /// Beginnings of the names of cases; empty: all.
    pub only: Vec<String>,
}

/// Where pages go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CaseBacking {
    /// Compressed memory alone.
    Zram,
    /// Compressed memory with the swap file behind it, which it does not need.
    DiskPresent,
    /// A small pool and mostly data that does not compress: pool and file hold parts of nearly
    /// every range. The pressure stays, and compresses better than the target: what goes out for it
    /// is more than the pool takes, if all of the target comes in.
    Mixed,
}

/// What was published of a case.
#[derive(Clone, Copy, Default)]
struct PublishedCase {
    elapsed: Option<(f64, f64)>,
    /// Change of the refault phase in per cent.
    refault_pct: Option<f64>,
    pswpin: Option<f64>,
    zswpin: Option<f64>,
    zswpwb: Option<f64>,
    large: Option<f64>,
    fallback: Option<f64>,
}

/// One case. Sizes in MiB, as published.
struct Case {
    name: &'static str,
    target: f64,
    /// Without, the target is paged out by a hint.
    pressure: Option<f64>,
    ram: f64,
    data: &'static str,
    order: &'static str,
    hint: &'static str,
    backing: CaseBacking,
    page_cluster: Option<u8>,
    /// The target is memory that is mapped shared.
    shared: bool,
    seed: PublishedCase,
}

impl Case {
    fn new(
        name: &'static str,
        order: &'static str,
        backing: CaseBacking,
        page_cluster: Option<u8>,
        seed: PublishedCase,
    ) -> Case {
        let (pressure, ram, data) = if backing == CaseBacking::Mixed {
            (384.0, 424.0, "sixth")
        } else {
            (768.0, 640.0, "quarter")
        };
        Case {
            name,
            target: 512.0,
            pressure: Some(pressure),
            ram,
            data,
            order,
            hint: "none",
            backing,
            page_cluster,
            shared: false,
            seed,
        }
    }

    /// True if the sides take turns within a run. Under a pressure that stays, a round is not like
    /// the one before it.
    fn is_in_one_run(&self) -> bool {
        !["seq", "thin"].contains(&self.order) && self.backing != CaseBacking::Mixed
    }

    fn hint(self, hint: &'static str) -> Case {
        Case { hint, ..self }
    }
}

fn table(elapsed: (f64, f64), refault_pct: f64, large: f64) -> PublishedCase {
    PublishedCase {
        elapsed: Some(elapsed),
        refault_pct: Some(refault_pct),
        large: Some(large),
        ..PublishedCase::default()
    }
}

fn matrix(pswpin: f64, zswpin: f64, zswpwb: f64, large: f64) -> PublishedCase {
    PublishedCase {
        pswpin: Some(pswpin),
        zswpin: Some(zswpin),
        zswpwb: Some(zswpwb),
        large: Some(large),
        ..PublishedCase::default()
    }
}

#[allow(clippy::approx_constant, reason = "one of the measured times")]
fn cases() -> Vec<Case> {
    use CaseBacking::{DiskPresent, Mixed, Zram};
    let zram = |name, order, seed| Case::new(name, order, Zram, None, seed);
    let disk = |name, order, seed| {
        Case::new(name, order, DiskPresent, Some(5), PublishedCase { pswpin: Some(0.0), ..seed })
    };
    let pressure = |name, order, seed| Case::new(name, order, Mixed, Some(5), seed);
    let policy = |name, order, page_cluster, backing, seed| {
        Case::new(name, order, backing, Some(page_cluster), seed)
    };
    let usama = Case {
        target: 1024.0,
        pressure: None,
        ram: 1152.0,
        data: "pattern",
        ..zram("usama_1g", "seq", table((11.260, 10.301), -22.2, 16381.1))
    };
    let shmem = |name, order, large| Case {
        target: 256.0,
        pressure: None,
        ram: 288.0,
        data: "pattern",
        shared: true,
        ..zram(name, order, PublishedCase { large: Some(large), ..PublishedCase::default() })
    };
    let of_pressure = |pswpin, zswpin, fallback, table| PublishedCase {
        pswpin: Some(pswpin),
        zswpin: Some(zswpin),
        fallback: Some(fallback),
        ..table
    };
    let seq_pressure = of_pressure(99038.0, 20327.0, 3730.0, table((5.908, 5.790), 3.0, 0.0));
    let sparse_pressure = of_pressure(6196.0, 1297.0, 0.0, table((5.104, 5.068), -9.1, 0.0));
    vec![
        usama,
        zram("nohint_seq64", "seq", table((4.398, 4.025), -21.1, 6221.1)),
        zram("seqhint_seq64", "seq", table((4.283, 3.948), -20.6, 6223.5)).hint("seq"),
        zram("stride64_sparse", "stride", table((3.095, 3.086), 5.8, 1.0)),
        zram("random64_sparse", "sparse", table((3.095, 3.076), 0.7, 0.0)),
        zram("thinning", "thin", PublishedCase::default()),
        zram("random64_full", "full", table((4.423, 4.405), 0.1, 0.0)),
        disk("disk_seq64", "seq", table((4.399, 4.279), -10.5, 3110.7)),
        disk("disk_stride64_sparse", "stride", table((3.103, 3.119), 6.2, 0.0)),
        disk("disk_random64_sparse", "sparse", table((3.142, 3.097), -2.2, 0.1)),
        disk("disk_random64_full", "full", table((4.473, 4.445), 0.9, 0.4)),
        pressure("seq64_full_pressure", "seq", seq_pressure),
        pressure("random64_sparse_full_pressure", "sparse", sparse_pressure),
        policy("pc0_seq", "seq", 0, DiskPresent, matrix(0.0, 99559.0, 0.0, 0.0)),
        policy("pc3_seq", "seq", 3, DiskPresent, matrix(0.0, 99498.0, 0.0, 0.0)),
        policy("pc4_seq", "seq", 4, DiskPresent, matrix(0.0, 99512.0, 0.0, 3109.0)),
        policy("pc5_seq", "seq", 5, DiskPresent, matrix(0.0, 99657.0, 0.0, 3113.0)),
        policy("hint_none_random_sparse", "sparse", 5, DiskPresent, matrix(0.0, 6265.0, 0.0, 0.0)),
        policy("hint_random_seq", "seq", 5, DiskPresent, matrix(0.0, 99488.0, 0.0, 0.0))
            .hint("rand"),
        policy("mixed_seq_full", "seq", 5, Mixed, matrix(97725.0, 20147.0, 84.0, 569.0)),
        policy("mixed_random_sparse_full", "sparse", 5, Mixed, matrix(6230.0, 1302.0, 0.0, 0.0)),
        shmem("shmem_nohint_seq", "seq", 0.0),
        shmem("shmem_seq_refault_hint", "seq", 4096.0).hint("seq"),
        shmem("shmem_random_refault_hint_sparse", "sparse", 0.0).hint("rand"),
    ]
}

/// What one run gave, or one round of it.
struct RoundOutcome {
    touched: Touched,
    counters: BTreeMap<String, u64>,
}

impl RoundOutcome {
    fn add(&mut self, other: &RoundOutcome) {
        self.touched.elapsed_s += other.touched.elapsed_s;
        self.touched.refault_s += other.touched.refault_s;
        self.touched.pages += other.touched.pages;
        for (name, more) in &other.counters {
            *self.counters.entry(name.clone()).or_default() += more;
        }
    }

    fn counter(&self, name: &str) -> f64 {
        self.counters.get(name).copied().unwrap_or(0) as f64
    }

    /// Blocks of 64 KiB that came in whole, as parts of larger ones too.
    fn large(&self) -> f64 {
        let blocks =
            |k: usize| self.counter(&format!("hugepages-{}kB/swpin", 64 << k)) * f64::from(1 << k);
        (0..ORDERS).map(blocks).sum()
    }

    fn fallback(&self) -> f64 {
        (0..ORDERS).map(|k| self.counter(&format!("hugepages-{}kB/swpin_fallback", 64 << k))).sum()
    }

    fn loaded(&self) -> f64 {
        ["zswpin", "pswpin", "swpin_zero", "swap_cache_hit"]
            .iter()
            .map(|name| self.counter(name))
            .sum()
    }

    fn hit_pct(&self) -> f64 {
        self.counter("swap_ra_hit") / self.counter("swap_ra").max(1.0) * 100.0
    }
}

/// From 64 KiB to 2 MiB.
const ORDERS: usize = 6;

/// The command line of a run.
fn command(case: &Case, plan: &ZswapinPlan, order_0: bool, rounds: u32) -> Result<Command, String> {
    let scale = plan.scale;
    let exe =
        std::env::current_exe().map_err(|e| format!("cannot find this program's own file: {e}"))?;
    let bytes = |mib: f64| ((mib * scale * MIB) as u64) & !0x1f_ffff;
    let ram = bytes(case.ram).max(MIN_RAM_BYTES);
    let mut command = Command::new(&exe);
    command.args(["run", "--no-daemon", "--quiet", "--ram", &ram.to_string()]);
    match case.backing {
        CaseBacking::Zram => {
            command.args(["--swap", &format!("zram:{ram}")]);
        }
        CaseBacking::DiskPresent => {}
        CaseBacking::Mixed => {
            let pool = ((38.0 * scale * MIB) as u64).max(1 << 20);
            let dir = std::env::temp_dir();
            command.args([
                "--swap",
                &format!("zram:{pool}"),
                "--swap",
                &format!("file:{}", dir.display()),
            ]);
        }
    }
    if let Some(page_cluster) = case.page_cluster {
        command.args(["--page-cluster", &page_cluster.to_string()]);
    }
    if order_0 {
        command.args(["--largest-order", "0"]);
    }
    if case.shared {
        command.arg("--shared");
    }
    command.arg("--").arg(&exe).args(["lab-work", "--target", &bytes(case.target).to_string()]);
    command.args([
        "--data",
        case.data,
        "--order",
        case.order,
        "--hint",
        case.hint,
        "--rounds",
        &rounds.to_string(),
    ]);
    if let Some(pressure) = case.pressure {
        command.args(["--pressure", &bytes(pressure).to_string()]);
    }
    if case.shared {
        command.arg("--shared");
    }
    if case.backing == CaseBacking::Mixed {
        command.args(["--hold", "--pressure-data", "third"]);
    }
    Ok(command)
}

/// One run on a side; what it gives is the sum of its rounds.
fn run(lab: &Lab, case: &Case, plan: &ZswapinPlan, order_0: bool) -> Result<RoundOutcome, String> {
    let mut sum = RoundOutcome {
        touched: Touched { elapsed_s: 0.0, refault_s: 0.0, pages: 0 },
        counters: BTreeMap::new(),
    };
    rounds(
        lab,
        case,
        command(case, plan, order_0, plan.rounds)?,
        plan.rounds,
        |_, _| Ok(()),
        |_, outcome| sum.add(&outcome),
    )?;
    Ok(sum)
}

/// One run in which the sides take turns, as many rounds of each as are planned; what each gives is
/// a pair's half. One round before them is not counted: it fills the target.
fn run_of_both(lab: &Lab, case: &Case, plan: &ZswapinPlan, pair: &mut Pair) -> Result<(), String> {
    let all = 1 + 2 * plan.rounds;
    // Pairs begin with the first counted round; the first side changes from pair to pair.
    let is_base = |round: u32| round % 4 < 2;
    let prepare = |run: u32, round: u32| {
        let order = if is_base(round) { "0" } else { "default" };
        let set = [("largest-order".to_owned(), order.to_owned())];
        client::readahead(Some(run), &set)
            .map(drop)
            .map_err(|error| format!("{}: {error}", case.name))
    };
    rounds(
        lab,
        case,
        command(case, plan, false, all)?,
        all,
        prepare,
        |round, outcome| match is_base(round) {
            _ if round == 0 => {}
            true => pair.base.push(outcome),
            false => pair.ours.push(outcome),
        },
    )
}

/// Runs `rounds` rounds; `prepare` is called with the run and the round before the target is
/// touched, and `take` with what the round gave.
fn rounds(
    lab: &Lab,
    case: &Case,
    mut command: Command,
    rounds: u32,
    prepare: impl Fn(u32, u32) -> Result<(), String>,
    mut take: impl FnMut(u32, RoundOutcome),
) -> Result<(), String> {
    let failed = |what: &str| format!("{}: {what}", case.name);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut running = lab.restorer.spawn(command).map_err(|e| failed(&e))?;
    let child = &mut running.child;
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(failed("no pipes"));
    };
    let run = child.id();
    let mut lines = Lines::new(stdout, Instant::now() + RUN_TIMEOUT);
    let mut line = || match lines.next_line() {
        Ok(Next::Line(line)) => Ok(line),
        Ok(Next::End) => Err(failed("the program ended before it was through")),
        Ok(Next::Late) => Err(failed("the program says nothing any more")),
        Err(error) => Err(failed(&error.to_string())),
    };
    let stats =
        || client::stats(Some(run)).map(|view| view.stats).map_err(|e| failed(&e.to_string()));
    let mut go_on = || writeln!(stdin).map_err(|e| failed(&e.to_string()));
    for round in 0..rounds {
        if line()? != READY {
            return Err(failed("the program said something else than that it is ready"));
        }
        prepare(run, round)?;
        let before = steady_stats(&stats)?;
        go_on()?;
        let touched: Touched =
            serde_json::from_str(&line()?).map_err(|e| failed(&e.to_string()))?;
        let more = |(name, value): (String, u64)| {
            let more = value.saturating_sub(before.get(&name).copied().unwrap_or(0));
            (name, more)
        };
        take(round, RoundOutcome { touched, counters: stats()?.into_iter().map(more).collect() });
        go_on()?;
    }
    let status = running.child.wait().map_err(|e| failed(&e.to_string()))?;
    if !status.success() {
        return Err(failed(&format!("the program ended with {status}")));
    }
    Ok(())
}

/// Counters when nothing goes out any more.
fn steady_stats(
    stats: &impl Fn() -> Result<BTreeMap<String, u64>, String>,
) -> Result<BTreeMap<String, u64>, String> {
    let out = |stats: &BTreeMap<String, u64>| {
        ["pswpout", "zswpout", "zswpwb"].map(|name| stats.get(name).copied().unwrap_or(0))
    };
    let mut last = stats()?;
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(60));
        let now = stats()?;
        if out(&now) == out(&last) {
            return Ok(now);
        }
        last = now;
    }
    Ok(last)
}

/// Both sides of a case, in the order of their runs.
#[derive(Default)]
struct Pair {
    base: Vec<RoundOutcome>,
    ours: Vec<RoundOutcome>,
}

impl Pair {
    fn row(&self, case: &Case, metric: &str, unit: &str, f: impl Fn(&RoundOutcome) -> f64) -> Row {
        let of = |side: &[RoundOutcome]| side.iter().map(&f).collect::<Vec<f64>>();
        let (base, ours) = (of(&self.base), of(&self.ours));
        Row::new(case.name, metric, unit, mean(&base), mean(&ours))
            .with_deviations(deviation(&base), deviation(&ours))
    }

    /// The median of the ratios of neighbours: what a moment's noise does to one pair it does not
    /// do to the middle one.
    fn ratio_row(&self, case: &Case, metric: &str, f: impl Fn(&RoundOutcome) -> f64) -> Row {
        ratio_row(case.name, metric, middle_of(&ratios(&self.base, &self.ours, f)))
    }

    fn rows(&self, case: &Case) -> Vec<Row> {
        let seed = &case.seed;
        let with_seed = |row: Row, seed_after: Option<f64>| Row { seed_after, ..row };
        let elapsed = self.row(case, "elapsed", "s", |o| o.touched.elapsed_s);
        let refault = self.row(case, "refault", "s", |o| o.touched.refault_s);
        vec![
            seed.elapsed
                .map_or(elapsed.clone(), |(before, after)| elapsed.shaped_like(before, after)),
            // Only the change is published.
            seed.refault_pct.map_or(refault.clone(), |pct| refault.shaped_like(100.0, 100.0 + pct)),
            self.ratio_row(case, "elapsed, ratio", |o| o.touched.elapsed_s),
            self.ratio_row(case, "refault, ratio", |o| o.touched.refault_s),
            with_seed(self.row(case, "zswpin", "pages", |o| o.counter("zswpin")), seed.zswpin),
            with_seed(self.row(case, "pswpin", "pages", |o| o.counter("pswpin")), seed.pswpin),
            with_seed(self.row(case, "zswpwb", "pages", |o| o.counter("zswpwb")), seed.zswpwb),
            with_seed(self.row(case, "64K in", "blocks", RoundOutcome::large), seed.large),
            with_seed(self.row(case, "fallbacks", "blocks", RoundOutcome::fallback), seed.fallback),
            self.row(case, "loaded per page touched", "pages", |o| {
                o.loaded() / o.touched.pages as f64
            }),
            self.row(case, "hits of readahead", "%", RoundOutcome::hit_pct),
        ]
    }

    fn refault_change(&self) -> f64 {
        let of = |side: &[RoundOutcome]| {
            mean(&side.iter().map(|o| o.touched.refault_s).collect::<Vec<_>>())
        };
        (of(&self.ours) / of(&self.base).max(1e-9) - 1.0) * 100.0
    }
}

/// Runs all cases, or those asked for.
pub(crate) fn measure(lab: &Lab, plan: &ZswapinPlan) -> Result<LabReport, String> {
    let cases = cases();
    let is_wanted = |case: &&Case| {
        plan.only.is_empty() || plan.only.iter().any(|only| case.name.starts_with(only.as_str()))
    };
    let wanted: Vec<&Case> = cases.iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
        return Err(format!("--only: no case begins so; there are {}", names.join(", ")));
    }
    let steps = wanted.len() as u64 * u64::from(plan.runs);
    lab.progress.expect(steps, steps);
    let mut rows = Vec::new();
    let (mut ours, mut seeds) = (Vec::new(), Vec::new());
    for (number, case) in wanted.iter().enumerate() {
        let mut pair = Pair::default();
        for turn in 0..plan.runs {
            lab.progress.begin(&format!("{}, run {} of {}", case.name, turn + 1, plan.runs));
            if case.is_in_one_run() {
                run_of_both(lab, case, plan, &mut pair)?;
                continue;
            }
            // The first side changes too.
            for order_0 in [turn % 2 == 0, turn % 2 != 0] {
                let side = if order_0 { &mut pair.base } else { &mut pair.ours };
                side.push(run(lab, case, plan, order_0)?);
            }
        }
        rows.extend(pair.rows(case));
        let x = number as f64 + 1.0;
        ours.push((x, 100.0 + pair.refault_change()));
        seeds.extend(case.seed.refault_pct.map(|pct| (x, 100.0 + pct)));
    }
    let mut curves = vec![Curve { name: "swaptide".into(), ours: true, points: ours }];
    if !seeds.is_empty() {
        curves.push(Curve { name: "published".into(), ours: false, points: seeds });
    }
    let (runs, rounds, scale) = (plan.runs, plan.rounds, plan.scale);
    Ok(LabReport {
        name: "zswapin",
        title: format!(
            "order 0 alone (before) and the policy (after), {runs} runs of {rounds} rounds of \
            each, {scale} of the published sizes"
        ),
        rows,
        plot: Plot {
            x: "case, as in the table".into(),
            y: "refault, % of order 0".into(),
            log_x: false,
            curves,
        },
        notes: notes(),
    })
}

fn notes() -> Vec<String> {
    [
        "mean+-sample standard deviation; counters are those of the refault phase",
        "sides take turns run by run; stride, sparse and full (but under pressure): round by round \
        within each run, after one that is not counted",
        "`ratio` is the median of the ratios of neighbours, in per cent of before, with its 95% \
        bounds as deviation",
        "the published refault is given as order 0 = 100; times and counts are of another machine \
        and of the kernel",
        "pressure is freed before the refault phase; usama_1g pages the target out by a hint \
        instead",
        "pressure and mixed rows: one page of the target in six compresses; the pressure stays, of \
        which one in three does",
        "64K in: aligned 64K that came in whole for one fault; a larger block counts as several",
        "shmem: shared memory, paged out by a hint; published are numbers of large swap-ins \
        alone, and has no evidence for shared memory but hints",
    ]
    .map(String::from)
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_tables_are_there_whole() {
        let cases = cases();
        // And one row of our own.
        assert_eq!(cases.len(), 6 + 1 + 4 + 2 + 8 + 3);
        let mut names: Vec<_> = cases.iter().map(|case| case.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), cases.len());
        let matrix = cases.iter().filter(|case| case.seed.zswpwb.is_some());
        assert_eq!(
            matrix.filter_map(|case| case.page_cluster).collect::<Vec<_>>(),
            [0, 3, 4, 5, 5, 5, 5, 5]
        );
    }

    #[test]
    fn the_sides_differ_in_the_largest_order_alone() {
        let text = |command: Command| {
            command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let plan = ZswapinPlan { runs: 1, rounds: 1, scale: 0.1, only: Vec::new() };
        for case in cases() {
            let (base, ours) = (
                text(command(&case, &plan, true, 1).unwrap()),
                text(command(&case, &plan, false, 1).unwrap()),
            );
            let at = base
                .iter()
                .position(|arg| arg == "--largest-order")
                .expect("the baseline's setting");
            let mut rest = base.clone();
            assert_eq!(rest.drain(at..at + 2).collect::<Vec<_>>(), ["--largest-order", "0"]);
            assert_eq!(rest, ours);
        }
    }

    #[test]
    fn deviations_are_those_of_a_sample() {
        let values = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0];
        assert_eq!(mean(&values), 5.0);
        assert!((deviation(&values) - (32.0f64 / 7.0).sqrt()).abs() < 1e-12);
        assert_eq!(deviation(&[3.0]), 0.0);
    }
}
