//! `swaptide bench`: checks the arguments, runs one benchmark, and writes its report.

use crate::args::{BenchArgs, Benchmark, PeerArg};
use crate::benchmarks::{costs, density, overhead, real, sweep, threads, throughput};
use crate::output::is_stdout;
use crate::peers::kernel::KernelPeer;
use crate::peers::restore::{Machine, Restorer};
use crate::run::Runner;
use crate::session::{Failed, Session, publish};
use crate::workload::phases::Phase;

/// Runs the benchmark. Exit status: 0, 1 where a run failed, 2 for bad input or a peer that cannot
/// be set up here.
pub fn main(args: &BenchArgs) -> u8 {
    match bench(args) {
        Ok(()) => 0,
        Err(Failed(status, message)) => {
            eprintln!("swaptide bench: {message}");
            status
        }
    }
}

fn bench(args: &BenchArgs) -> Result<(), Failed> {
    for (flag, file) in [("--json", &args.json), ("--svg", &args.svg)] {
        // Found out now, not after minutes of measuring.
        if let Some(file) = file.as_ref().filter(|file| !is_stdout(file)) {
            let open = std::fs::OpenOptions::new().create(true).append(true).open(file);
            open.map_err(|e| Failed(2, format!("{flag} {}: {e}", file.display())))?;
        }
    }
    if !args.swap_dir.is_dir() {
        return Err(Failed(2, format!("--swap-dir {}: not a directory", args.swap_dir.display())));
    }
    let sweeps = args.name == Benchmark::Sweep;
    let threaded = args.name == Benchmark::Threads;
    let is_real = args.name == Benchmark::Real;
    let rests = args.name == Benchmark::Density;
    let brings = is_real || rests || args.name == Benchmark::KernelBuild;
    let flags = [
        (sweeps && args.ram.is_some(), "--ram: a sweep takes its budgets from --budgets"),
        (sweeps && args.strict_budget, "--strict-budget: a sweep measures the bare budget anyway"),
        (!sweeps && !args.budgets.is_empty(), "--budgets: only for sweep; give --ram SIZE"),
        (!sweeps && args.ratio.len() > 1, "--ratio: several only for sweep"),
        (!threaded && !args.threads.is_empty(), "--threads: only for threads"),
        (threaded && args.strict_budget, "--strict-budget: not for threads"),
        (
            !is_real && !rests && !args.real.program.is_empty(),
            "--program: only for real and density",
        ),
        (brings && args.ram.is_some(), "--ram: real programs get a part of what they have"),
        (brings && args.data.is_some(), "--data: real programs bring their own"),
        (brings && args.strict_budget, "--strict-budget: not for real programs"),
    ];
    if let Some((_, message)) = flags.iter().find(|(wrong, _)| *wrong) {
        return Err(Failed(2, (*message).into()));
    }
    let machine = Machine::real();
    let peers = chosen_peers(args, &machine)?;
    if threaded && peers.len() > 1 {
        return Err(Failed(2, "--peer: threads compares with one peer".into()));
    }
    let restorer = Restorer::new(machine);
    restorer.watch_signals()?;
    let runs = args.runs.unwrap_or(if sweeps { 1 } else { 3 });
    let ram = args.ram.unwrap_or(256 << 20);
    let session =
        Session { args, runs, ram, peers, runner: Runner::new(restorer, &args.swap_dir)? };
    session.runner.restorer.at_interrupt(session.runner.progress.ender());
    if let Some(steps) = steps(&session) {
        session.expect(steps);
    }
    let report = match args.name {
        Benchmark::Fill => throughput::memory(&session, Phase::Fill, &[Phase::Fill]),
        Benchmark::Seq => throughput::memory(&session, Phase::Seq, &[Phase::Fill, Phase::Seq]),
        Benchmark::Random => {
            throughput::memory(&session, Phase::Random, &[Phase::Fill, Phase::Random])
        }
        Benchmark::Again => {
            throughput::memory(&session, Phase::Again, &[Phase::Fill, Phase::Random, Phase::Again])
        }
        Benchmark::Threads => threads::threads(&session),
        Benchmark::Pressure => throughput::pressure(&session),
        Benchmark::Pool => throughput::pool(&session),
        Benchmark::Within => overhead::within(&session),
        Benchmark::Startup => overhead::startup(&session),
        Benchmark::Sweep => sweep::sweep(&session),
        Benchmark::Cipher => costs::cipher(&session),
        Benchmark::Fork => costs::fork(&session),
        Benchmark::Bgsave => costs::bgsave(&session),
        Benchmark::Real => real::real(&session),
        Benchmark::KernelBuild => real::kernel_build(&session),
        Benchmark::Density => density::density(&session),
    };
    session.runner.progress.end();
    let report = report?;
    publish(args, &report)?;
    if !report.failed.is_empty() {
        return Err(Failed(1, report.failed.join("; ")));
    }
    Ok(())
}

/// How many runs there will be; `None` where the benchmark says it itself, or cannot.
fn steps(session: &Session<'_>) -> Option<u64> {
    let (args, runs) = (session.args, u64::from(session.runs));
    let alone = if args.strict_budget { runs } else { 0 };
    Some(match args.name {
        Benchmark::Threads => {
            let counts =
                if args.threads.is_empty() { threads::THREADS.len() } else { args.threads.len() };
            counts as u64 * session.steps_of_comparison()
        }
        Benchmark::Within | Benchmark::Cipher | Benchmark::Fork => 2 * runs,
        Benchmark::Startup => u64::from(overhead::STARTS) * runs,
        Benchmark::Sweep | Benchmark::Real | Benchmark::KernelBuild | Benchmark::Density => {
            return None;
        }
        _ => session.steps_of_comparison() + alone,
    })
}

/// The peers asked for that can be had. With `all`, one that cannot is named and left out; asked
/// for by name, it ends the call.
fn chosen_peers(args: &BenchArgs, machine: &Machine) -> Result<Vec<KernelPeer>, Failed> {
    let alone = [
        Benchmark::Within,
        Benchmark::Startup,
        Benchmark::Cipher,
        Benchmark::Fork,
        Benchmark::Density,
    ];
    let compares = !alone.contains(&args.name);
    let kernel = |p: &&PeerArg| **p != PeerArg::None;
    if !compares && args.peer.iter().any(|p| kernel(&p)) {
        return Err(Failed(
            2,
            "--peer: this benchmark compares nothing with the kernel's swap".into(),
        ));
    }
    if args.peer.is_empty() && args.name != Benchmark::Sweep && compares {
        let usual = if matches!(args.name, Benchmark::Pressure | Benchmark::Pool) {
            KernelPeer::Zswap
        } else {
            KernelPeer::Zram
        };
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
    for peer in KernelPeer::ALL {
        let named = match peer {
            KernelPeer::Zram => PeerArg::KernelZram,
            KernelPeer::File => PeerArg::KernelFile,
            KernelPeer::Zswap => PeerArg::KernelZswap,
        };
        let named = args.peer.contains(&named);
        match peer.check(machine) {
            _ if !all && !named => {}
            _ if args.name == Benchmark::Pool && peer == KernelPeer::File => {
                if named {
                    return Err(Failed(
                        2,
                        format!("--peer {}: it has no compressed memory", peer.name()),
                    ));
                }
            }
            Ok(_) => chosen.push(peer),
            Err(e) if named => return Err(Failed(2, format!("--peer {}: {e}", peer.name()))),
            Err(e) => eprintln!("swaptide bench: left out: --peer {}: {e}", peer.name()),
        }
    }
    if all && chosen.is_empty() {
        return Err(Failed(2, "--peer all: no kernel peer can be set up here".into()));
    }
    Ok(chosen)
}
