//! `swaptide lab preload`: programs that were frozen into a network tier and are brought back,
//! against their cold start.
//!
//! Owns three services that do the same in three languages: read a file of rows, keep tables of
//! them, answer a request that looks up 20,000 rows at random. *Cold* is from the start of the
//! program to the right answer; *brought back* is from the command that brings the group back, with
//! the request sent at the same moment, to the right answer of the program that was frozen. Each
//! runs with room for all of it, as an application does that is preloaded; the network tier is an
//! NBD server on this machine, which keeps its export in its own memory.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::context::Lab;
use crate::report::{Curve, LabReport, Plot, Row};
use swaptide_bench::RunningChild;
use swaptide_host::control::{client, server};

use crate::programs::pairs::{ScratchDir, deviation, mean};

const GROUP: &str = "/app";
/// Rows at the whole size.
const FULL_SIZE_ROWS: f64 = 600_000.0;
/// Nothing here takes longer, even on a machine with much else to do.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);
/// What was published: seconds of a cold and a preloaded start of three applications.
const SEED: [(f64, f64); 3] = [(13.17, 4.18), (5.60, 1.12), (10.25, 2.00)];
const JAVA: &str = include_str!("services/Service.java");
const NODE: &str = include_str!("services/service.js");
const PYTHON: &str = include_str!("services/service.py");

/// The parameters of the experiment.
pub(crate) struct PreloadPlan {
    /// Starts of each kind.
    pub runs: u32,
    /// Part of the rows.
    pub scale: f64,
    /// Beginnings of the names of programs; empty: all.
    pub only: Vec<String>,
}

impl PreloadPlan {
    fn wants(&self, service: &Service) -> bool {
        self.only.is_empty() || self.only.iter().any(|begin| service.name.starts_with(begin))
    }
}

/// One of the three.
struct Service {
    name: &'static str,
    /// What it cannot do without, and the package that has it.
    needs: &'static [(&'static str, &'static str)],
    file: &'static str,
    text: &'static str,
}

const SERVICES: [Service; 3] = [
    Service {
        name: "java",
        needs: &[("java", "default-jdk-headless"), ("javac", "default-jdk-headless")],
        file: "Service.java",
        text: JAVA,
    },
    Service { name: "node", needs: &[("node", "nodejs")], file: "service.js", text: NODE },
    Service { name: "python", needs: &[("python3", "python3")], file: "service.py", text: PYTHON },
];

impl Service {
    /// True if all that it needs is installed.
    fn is_here(&self) -> bool {
        self.needs.iter().all(|(program, _)| is_there(program))
    }

    /// Makes it ready to be started in `place`, and says how.
    fn install(&self, place: &Path) -> Result<Vec<String>, String> {
        let file = place.join(self.file);
        std::fs::write(&file, self.text).map_err(|error| format!("{}: {error}", file.display()))?;
        let own = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let path = |name: &str| place.join(name).display().to_string();
        Ok(match self.name {
            "java" => {
                let done = Command::new("javac")
                    .arg("-d")
                    .arg(place)
                    .arg(&file)
                    .output()
                    .map_err(|error| error.to_string())?;
                if !done.status.success() {
                    return Err(format!("javac: {}", String::from_utf8_lossy(&done.stderr)));
                }
                own(&[
                    "java",
                    "-XX:+UseSerialGC",
                    "-Xmx1500m",
                    "-cp",
                    &place.display().to_string(),
                    "Service",
                ])
            }
            "node" => own(&["node", "--max-old-space-size=1500", &path(self.file)]),
            _ => own(&["python3", &path(self.file)]),
        })
    }
}

fn is_there(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|place| place.join(program).is_file()))
}

/// A run and the program in it: ended together.
struct Started {
    run: RunningChild,
    socket: PathBuf,
}

impl Drop for Started {
    fn drop(&mut self) {
        // The program's parent outlives a killed run; the signal is passed on to the program.
        // SAFETY: a call without pointers; the number is of a child that was not waited for yet.
        unsafe { libc::kill(self.run.child.id() as i32, libc::SIGTERM) };
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end && matches!(self.run.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn nbd_server(lab: &Lab, place: &Path) -> Result<(RunningChild, String), String> {
    let socket = place.join("nbd.socket");
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--unix"]).arg(&socket).args(["memory", "8G"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let server = lab.restorer.spawn(&mut command)?;
    let end = Instant::now() + Duration::from_secs(20);
    while UnixStream::connect(&socket).is_err() {
        if Instant::now() > end {
            return Err("nbdkit does not listen".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok((server, format!("nbd+unix:///?socket={}", socket.display())))
}

/// The file of rows: the same for all.
fn write_rows(path: &Path, rows: u32) -> std::io::Result<()> {
    const WORDS: [&str; 16] = [
        "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty",
        "knoll", "larch", "marsh", "north", "ocean", "plain",
    ];
    let mut out = std::io::BufWriter::new(std::fs::File::create(path)?);
    let mut state = 88_172_645_463_325_252u64;
    for key in 0..rows {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = |shift: u32| WORDS[(state >> shift) as usize % WORDS.len()];
        writeln!(
            out,
            "{key},{}-{:08x},{},{}{} {} {} {}",
            word(8),
            state as u32,
            state >> 40,
            word(12),
            state % 5000,
            word(20),
            word(28),
            word(36)
        )?;
    }
    out.flush()
}

/// Asks for an answer until there is one.
fn ask(socket: &Path, seed: u32, alive: &mut Child) -> Result<u32, String> {
    let end = Instant::now() + RUN_TIMEOUT;
    loop {
        if let Ok(mut client) = UnixStream::connect(socket) {
            let _ = client.set_read_timeout(Some(RUN_TIMEOUT));
            let mut text = String::new();
            let told = writeln!(client, "{seed}").and_then(|()| client.read_to_string(&mut text));
            return match (told, text.trim().parse()) {
                (Ok(_), Ok(answer)) => Ok(answer),
                (told, _) => Err(format!("it answers {text:?} ({told:?})")),
            };
        }
        if let Ok(Some(status)) = alive.try_wait() {
            return Err(format!("it ended with {status} before it answered"));
        }
        if Instant::now() > end {
            return Err("it never answered".into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What was measured of a program, in seconds and bytes.
#[derive(Default)]
struct ServiceTimes {
    cold: Vec<f64>,
    back: Vec<f64>,
    all_back: Vec<f64>,
    away: Vec<f64>,
}

fn once(
    lab: &Lab,
    service: &Service,
    words: &[String],
    rows: &Path,
    place: &Path,
    url: &str,
    seen: &mut ServiceTimes,
) -> Result<(), String> {
    let failed = |what: String| format!("{}: {what}", service.name);
    let exe = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let socket = place.join(format!("{}.socket", service.name));
    let mut command = Command::new(exe);
    command.args([
        "run",
        "--quiet",
        "--no-daemon",
        "--ram",
        "3G",
        "--group",
        GROUP,
        "--swap",
        "zram:1G",
        "--swap",
        url,
        "--",
    ]);
    command.args(words).arg(rows).arg(&socket).stdin(Stdio::null()).stdout(Stdio::null());
    let began = Instant::now();
    let mut started = Started { run: lab.restorer.spawn(&mut command).map_err(failed)?, socket };
    let pid = started.run.child.id();
    let first = ask(&started.socket, 1, &mut started.run.child).map_err(failed)?;
    seen.cold.push(began.elapsed().as_secs_f64());
    let control = |error: server::ControlError| failed(error.to_string());

    client::freeze_group(Some(pid), GROUP).map_err(control)?;
    let view = client::stats(Some(pid)).map_err(control)?;
    let (out, there): (u64, u64) = view.processes.iter().fold((0, 0), |(out, there), process| {
        (
            out + process.swapped_file_bytes,
            there
                + process.swapped_file_bytes
                + process.swapped_pool_bytes
                + process.resident_bytes,
        )
    });
    if out < there / 2 {
        return Err(failed(format!("only {out} of {there} bytes are on the network tier")));
    }
    seen.away.push(out as f64);
    let began = Instant::now();
    let preload = std::thread::spawn(move || {
        let done = client::preload_group(Some(pid), GROUP, |_| ())
            .map(|_| ())
            .map_err(|error| error.to_string());
        (done, Instant::now())
    });
    let again = ask(&started.socket, 1, &mut started.run.child).map_err(failed)?;
    seen.back.push(began.elapsed().as_secs_f64());
    let (done, at) = preload.join().map_err(|_| failed("a thread ended".into()))?;
    done.map_err(failed)?;
    seen.all_back.push((at - began).as_secs_f64());
    if again != first {
        return Err(failed(format!("it answered {first} before and {again} afterwards")));
    }
    Ok(())
}

/// Runs all programs.
///
/// # Errors
/// What failed, of which program.
pub(crate) fn measure(lab: &Lab, plan: &PreloadPlan) -> Result<LabReport, String> {
    if !is_there("nbdkit") {
        return Err("there is no nbdkit; apt install nbdkit".into());
    }
    let scratch = ScratchDir::new(&lab.restorer, "preload")?;
    let place = scratch.path();
    let (_server, url) = nbd_server(lab, place)?;
    let rows_file = place.join("rows.csv");
    let count = (FULL_SIZE_ROWS * plan.scale) as u32;
    write_rows(&rows_file, count).map_err(|error| format!("{}: {error}", rows_file.display()))?;
    let wanted = SERVICES.iter().filter(|service| plan.wants(service) && service.is_here()).count();
    let steps = wanted as u64 * u64::from(plan.runs);
    lab.progress.expect(steps, steps);
    let mut notes: Vec<String> = [
        "mean+-sample standard deviation",
        "cold: from the start to the right answer; brought back: from the command to the right \
        answer, the request sent at the same moment",
        "all of it back: when preload says that nothing is swapped any more",
        "the network tier is nbdkit on this machine, its export in memory; pages are encrypted and \
        authenticated on their way",
        "the published numbers are of three applications on an embedded device with flash storage, \
        preloaded from another device by NBD",
    ]
    .map(String::from)
    .into();
    let (mut rows, mut ours, mut seeds) = (Vec::new(), Vec::new(), Vec::new());
    for (number, service) in SERVICES.iter().enumerate() {
        if !plan.wants(service) {
            continue;
        }
        if let Some((program, package)) =
            service.needs.iter().find(|(program, _)| !is_there(program))
        {
            notes.push(format!(
                "{}: not measured, there is no {program}; apt install {package}",
                service.name
            ));
            continue;
        }
        let words = service.install(place).map_err(|error| format!("{}: {error}", service.name))?;
        let mut seen = ServiceTimes::default();
        for turn in 0..plan.runs {
            lab.progress.begin(&format!("{}, run {} of {}", service.name, turn + 1, plan.runs));
            once(lab, service, &words, &rows_file, place, &url, &mut seen)?;
        }
        let row = |metric: &str, back: &[f64]| {
            Row::new(service.name, metric, "s", mean(&seen.cold), mean(back))
                .with_deviations(deviation(&seen.cold), deviation(back))
        };
        let (cold, warm) = SEED[number];
        rows.push(row("until it answers", &seen.back).shaped_like(cold, warm));
        rows.push(row("until all of it is back", &seen.all_back));
        let mib = |bytes: f64| bytes / 1048576.0;
        rows.push(Row {
            after: Some(mib(mean(&seen.away))),
            ..Row::new(service.name, "on the network tier", "MiB", 0.0, 0.0)
        });
        ours.push((number as f64 + 1.0, mean(&seen.back) / mean(&seen.cold) * 100.0));
        seeds.push((number as f64 + 1.0, warm / cold * 100.0));
    }
    let curves = vec![
        Curve { name: "swaptide".into(), ours: true, points: ours },
        Curve { name: "published".into(), ours: false, points: seeds },
    ];
    Ok(LabReport {
        name: "preload",
        title: format!(
            "cold start (before) and brought back from a network tier (after), {} starts, {count} \
            rows",
            plan.runs
        ),
        rows,
        plot: Plot {
            x: "program, as in the table".into(),
            y: "time to answer, % of cold".into(),
            log_x: false,
            curves,
        },
        notes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_are_the_same_every_time_and_have_four_columns() {
        let scratch = ScratchDir::new(&Lab::quiet().restorer, "preload-test").expect("a directory");
        let paths = ["a", "b"].map(|name| scratch.path().join(name));
        paths.iter().for_each(|path| write_rows(path, 500).expect("written"));
        let [one, other] = paths.map(|path| std::fs::read_to_string(path).expect("read"));
        assert_eq!(one, other);
        for (number, line) in one.lines().enumerate() {
            let parts: Vec<&str> = line.split(',').collect();
            assert_eq!(
                (parts.len(), parts[0], parts[3].split(' ').count()),
                (4, number.to_string().as_str(), 4)
            );
            assert!(parts[2].parse::<i32>().is_ok());
        }
    }

    #[test]
    fn the_services_that_can_run_here_give_one_answer() {
        let lab = &Lab::quiet();
        let scratch = ScratchDir::new(&lab.restorer, "preload-services").expect("a directory");
        let rows = scratch.path().join("rows.csv");
        write_rows(&rows, 300).expect("rows");
        let mut answers = Vec::new();
        for service in SERVICES.iter().filter(|service| service.is_here()) {
            let words = service.install(scratch.path()).expect(service.name);
            let socket = scratch.path().join(service.name);
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).arg(&rows).arg(&socket).stdin(Stdio::null());
            let mut running = lab.restorer.spawn(&mut command).expect(service.name);
            answers.push(ask(&socket, 7, &mut running.child).expect(service.name));
        }
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
    }
}
