//! `swaptide lab`: the arguments, and the files that a result goes into.
//!
//! The table goes to standard output, or JSON in its place with `--json -`; a file for each of
//! `--json` and `--svg`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::context::Lab;
use crate::experiments::{allocator, scaling, search_space, swap_table};
use crate::plot::draw;
use crate::programs::{preload, tiers, zswapin};
use crate::report::LabReport;
use clap::{Args, ValueEnum};
use serde_json::json;
use swaptide_bench::{Restorer, StepProgress, is_stdout, print_titled};

/// Arguments of `swaptide lab`.
#[derive(Debug, Args)]
pub struct LabArgs {
    /// What to compare
    #[arg(value_name = "NAME")]
    name: Experiment,
    /// Write the rows to this file as JSON; without a file, or with -, print them instead of the
    /// table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Write a plot to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Fewer and smaller cases
    #[arg(long)]
    quick: bool,
    /// zswapin, tiers: the whole size and 10 runs of each side, which takes up to an hour [default:
    /// what ends within ten minutes on two CPUs]
    #[arg(long, conflicts_with = "quick")]
    full: bool,
    /// zswapin, tiers, preload: runs of each side [default: 3, tiers 5; 3 with --quick, preload 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// zswapin: rounds of swap-out and touches in each run
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=100),
    )]
    rounds: u32,
    /// zswapin: part of the published sizes; tiers, preload: of the whole size; 0.03 to 1 [default:
    /// zswapin 0.25, tiers 0.5, preload 1; 0.125 with --quick, tiers 0.5]
    #[arg(long, value_name = "PART", value_parser = scale)]
    scale: Option<f64>,
    /// zswapin, tiers, preload: only cases whose names start with this
    #[arg(long, value_name = "CASE", value_delimiter = ',')]
    only: Vec<String>,
}

fn scale(text: &str) -> Result<f64, String> {
    let part: f64 = text.parse().map_err(|_| "a number like 0.25".to_owned())?;
    if (0.03..=1.0).contains(&part) { Ok(part) } else { Err("from 0.03 to 1".into()) }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Experiment {
    /// Fallback of 64K folios on a device that is nearly full, four modes of
    /// thp_swap_allocator_test
    Allocator,
    /// Depth, size and speed of the swap cache on devices of 1G to 1T
    SearchSpace,
    /// The whole cycle of a page with 1 to 32 threads, metadata, BGSAVE
    SwapTable,
    /// The engine's data structures under faults and reclaim of 1 to 64 threads
    Scaling,
    /// Large swap-in, compared with order 0 only
    Zswapin,
    /// Cost of tiers and masks: memory walks and a compile job
    Tiers,
    /// Three services preloaded from a network tier, compared with a cold start
    Preload,
}

/// Runs one experiment. 0: done; 1: a run failed, or a file could not be written. A signal ends
/// what was started, removes what was made, and ends the call with 128 and its number.
pub fn main(args: &LabArgs) -> u8 {
    match run(args) {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "swaptide lab: {error}");
            1
        }
    }
}

fn run(args: &LabArgs) -> Result<(), String> {
    let lab = Lab { restorer: Restorer::here(), progress: StepProgress::default() };
    lab.restorer.watch_signals()?;
    lab.restorer.at_interrupt(lab.progress.ender());
    let report = match args.name {
        Experiment::Allocator => Ok(allocator::measure(&lab, args.quick)),
        Experiment::SearchSpace => Ok(search_space::measure(&lab, args.quick)),
        Experiment::SwapTable => Ok(swap_table::measure(&lab, args.quick)),
        Experiment::Scaling => scaling::measure(&lab, args.quick),
        Experiment::Zswapin | Experiment::Tiers | Experiment::Preload => of_engine(&lab, args),
    };
    // A program that the signal ended is no failure to tell of.
    lab.restorer.stop_if_interrupted();
    lab.progress.end();
    deliver(args, &report?, &machine())
}

/// The runs of each side, and the part of the size, of an experiment that runs programs. By default
/// each ends within ten minutes on two CPUs (docs/lab.md has the times).
fn sizes(args: &LabArgs) -> (u32, f64) {
    match (args.name, args.quick, args.full) {
        (Experiment::Preload, true, _) => (1, 0.125),
        (Experiment::Preload, ..) => (3, 1.0),
        (_, _, true) => (10, 1.0),
        (Experiment::Tiers, true, _) => (3, 0.5),
        (Experiment::Tiers, ..) => (5, 0.5),
        (_, true, _) => (3, 0.125),
        _ => (3, 0.25),
    }
}

/// The experiments that run programs.
fn of_engine(lab: &Lab, args: &LabArgs) -> Result<LabReport, String> {
    let (runs, scale) = sizes(args);
    let (runs, scale, only) =
        (args.runs.unwrap_or(runs), args.scale.unwrap_or(scale), args.only.clone());
    match args.name {
        Experiment::Tiers => {
            tiers::measure(lab, &tiers::TiersPlan { runs, rounds: runs * 20, scale, only })
        }
        Experiment::Preload => preload::measure(lab, &preload::PreloadPlan { runs, scale, only }),
        _ => {
            let plan = zswapin::ZswapinPlan { runs, rounds: args.rounds, scale, only };
            zswapin::measure(lab, &plan)
        }
    }
}

fn deliver(args: &LabArgs, report: &LabReport, machine: &serde_json::Value) -> Result<(), String> {
    let to_stdout = args.json.as_deref().is_some_and(is_stdout);
    let value = json!({
        "name": report.name,
        "machine": machine,
        "rows": report.rows,
        "notes": report.notes,
    });
    let text = format!("{value:#}\n");
    if to_stdout {
        // A reader that went away has seen enough.
        let _ = std::io::stdout().write_all(text.as_bytes());
    } else {
        print_titled(&format!("{}- machine: {machine}\n", report.text()));
    }
    if let Some(path) = args.json.as_deref().filter(|_| !to_stdout) {
        write(path, &text)?;
    }
    match &args.svg {
        Some(path) => write(path, &draw(&report.plot, report.name)?),
        None => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|e| {
        format!("{}: {e}; name a file in a directory that can be written", path.display())
    })
}

/// What the numbers depend on.
fn machine() -> serde_json::Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| {
        line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name.to_owned())
    });
    let load = read("/proc/loadavg").split(' ').next().map(str::to_owned);
    json!({
        "cpu": model,
        "cpus": std::thread::available_parallelism().map_or(1, usize::from),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "load": load,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Curve, Plot, Row};

    fn report() -> LabReport {
        let curves = vec![
            Curve { name: "trees".into(), ours: false, points: vec![(1.0, 40.0), (1024.0, 60.0)] },
            Curve {
                name: "swap table".into(),
                ours: true,
                points: vec![(1.0, 20.0), (1024.0, 20.0)],
            },
        ];
        LabReport {
            name: "search-space",
            title: "a against b".into(),
            rows: vec![
                Row::new("128G", "tree nodes", "KiB", 4.0, 3.0).same_as(303_952.0, 302_224.0),
            ],
            plot: Plot { x: "device, GiB".into(), y: "look-up, ns".into(), log_x: true, curves },
            notes: vec!["a note".into()],
        }
    }

    #[test]
    fn the_files_hold_what_was_measured() {
        let dir = std::env::temp_dir().join(format!("swaptide-lab-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (json, svg) = (dir.join("a.json"), dir.join("a.svg"));
        let args = LabArgs {
            name: Experiment::SearchSpace,
            json: Some(json.clone()),
            svg: Some(svg.clone()),
            quick: true,
            full: false,
            runs: None,
            rounds: 1,
            scale: None,
            only: Vec::new(),
        };
        deliver(&args, &report(), &machine()).unwrap();
        let value: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
        let row = &value["rows"][0];
        assert_eq!(
            (row["case"].as_str(), row["delta_pct"].as_f64(), row["same_quantity"].as_bool()),
            (Some("128G"), Some(-25.0), Some(true))
        );
        assert!(value["machine"]["cpus"].as_u64().unwrap() >= 1);
        assert!(fs::read_to_string(svg).unwrap().starts_with("<svg"));
        let nowhere = LabArgs { json: Some(dir.join("no/such/dir")), ..args };
        assert!(deliver(&nowhere, &report(), &machine()).unwrap_err().contains("no/such/dir"));
        fs::remove_dir_all(dir).unwrap();
    }
}
