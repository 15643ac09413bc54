//! Numbers for Prometheus, in the OpenMetrics text format, on a Unix socket or a port of this
//! machine alone.
//!
//! Everything is read again for each request. The answer is always complete. Names that begin with
//! `swaptide_` are of groups, areas and runs. Runs in containers have numbers besides under the
//! names, and with the labels, that kubelet's `/metrics/cadvisor` has for containers.

use std::fs::Permissions;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::cgroup::psi::Pressure;
use crate::cgroup::tree::{Events, GroupPath, GroupUsage};
use crate::client_conn::clients;
use crate::config::MetricsPlace;
use crate::container_labels::ContainerLabels;
use crate::control::server::{REQUEST_TIMEOUT, ReadWithin, read_request};
use crate::memctl::controller::{self, MemoryController};
use crate::report::totals::{ProcessView, View};

/// Clients that are answered at the same time.
const MAX_CLIENTS: usize = 32;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfGroup {
    group: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfEvent {
    group: String,
    event: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfArea {
    device: String,
    number: u32,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfRun {
    pid: u32,
    program: String,
    counter: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfContainer {
    container: String,
    pod: String,
    namespace: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfFailure {
    container: String,
    pod: String,
    namespace: String,
    failure_type: &'static str,
    scope: &'static str,
}

type Gauges<L> = Family<L, Gauge<u64, AtomicU64>>;

/// Answers there from now on.
///
/// # Errors
/// Why no request can be answered there.
pub fn serve(
    place: &MetricsPlace,
    controller: mpsc::Sender<controller::ControllerRequest>,
) -> io::Result<()> {
    let spawn = |serve: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name("metrics".into()).spawn(serve).map(drop)
    };
    match place {
        MetricsPlace::Socket(path) => {
            // One that was left behind: the daemon with the state directory is the only one.
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(path)?;
            std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
            spawn(Box::new(move || {
                let talking = Arc::new(());
                for (client, _) in clients(|| listener.accept()) {
                    let _ = client.set_write_timeout(Some(REQUEST_TIMEOUT));
                    let controller = controller.clone();
                    apart(&talking, move || drop(answer(&client, &client, &controller)));
                }
            }))
        }
        MetricsPlace::Port(port) => {
            let listener = TcpListener::bind(("127.0.0.1", *port))?;
            spawn(Box::new(move || {
                let talking = Arc::new(());
                for (client, _) in clients(|| listener.accept()) {
                    let _ = client.set_write_timeout(Some(REQUEST_TIMEOUT));
                    let controller = controller.clone();
                    apart(&talking, move || drop(answer(&client, &client, &controller)));
                }
            }))
        }
    }
}

/// Talks to a client in a thread of its own, so that a slow one does not delay the others; there
/// are [`MAX_CLIENTS`] of them at most, and without a thread it is hung up on.
fn apart(talking: &Arc<()>, talk: impl FnOnce() + Send + 'static) {
    let at = Arc::clone(talking);
    if Arc::strong_count(&at) > MAX_CLIENTS + 1 {
        return;
    }
    let talk = move || {
        talk();
        drop(at);
    };
    let _ = std::thread::Builder::new().name("client".into()).spawn(talk);
}

fn answer(
    from: impl ReadWithin,
    mut client: impl Write,
    controller: &mpsc::Sender<controller::ControllerRequest>,
) -> io::Result<()> {
    // The request and its headers, of which nothing matters, up to the empty line.
    let is_whole = |text: &[u8]| {
        [&b"\r\n\r\n"[..], b"\n\n"]
            .iter()
            .any(|end| text.windows(end.len()).any(|bytes| bytes == *end))
    };
    read_request(from, is_whole)?;
    let (status, text) = match controller::ask(controller, MetricsSnapshot::of) {
        Some(snapshot) => ("200 OK", snapshot.text()),
        None => ("503 Service Unavailable", String::new()),
    };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let length = text.len();
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: \
        close\r\n\r\n{text}"
    )
}

/// A group at a moment: what it has, what of swap areas, what happened, and how long its threads
/// waited.
#[derive(Default)]
struct OneGroup {
    path: String,
    usage: GroupUsage,
    leased: u64,
    happened: Events,
    pressure: Pressure,
}

/// A run at a moment.
struct OneRun {
    launcher: u32,
    program: String,
    container: Option<ContainerLabels>,
    view: View,
}

/// Everything at a moment.
#[derive(Default)]
struct MetricsSnapshot {
    budget: u64,
    groups: Vec<OneGroup>,
    areas: Vec<(u32, String, u64, u64)>,
    runs: Vec<OneRun>,
}

impl MetricsSnapshot {
    fn of(controller: &mut MemoryController) -> MetricsSnapshot {
        let runs: Vec<controller::ManagedRun> = controller.runs().cloned().collect();
        let runs = runs
            .into_iter()
            .map(|run| OneRun {
                launcher: run.launcher,
                program: run.program,
                container: run.container,
                view: controller.view(run.root),
            })
            .collect();
        let areas = controller.areas().view().into_iter();
        let areas = areas
            .map(|(id, view)| (u32::from(id.0), view.name, view.size_bytes, view.used_bytes))
            .collect();
        let budget = controller.budget();
        let groups = controller.groups();
        let one = |path: &GroupPath| {
            let index = groups.find(path).unwrap_or_default();
            OneGroup {
                path: path.to_string(),
                usage: groups.usage(index),
                leased: groups.swap_bytes(index),
                happened: groups.events(index),
                pressure: groups.pressure(index),
            }
        };
        MetricsSnapshot {
            budget,
            areas,
            runs,
            groups: groups.iter().map(|(_, group)| one(&group.path)).collect(),
        }
    }

    fn text(&self) -> String {
        let mut all = Registry::default();
        let registry = all.sub_registry_with_prefix("swaptide");
        let budget: Gauge<u64, AtomicU64> = Gauge::default();
        budget.set(self.budget);
        registry.register("budget_bytes", "Memory for all programs together", budget);
        self.register_groups(registry);
        let (size, used) = (Gauges::default(), Gauges::default());
        for (number, name, bytes, leased) in &self.areas {
            let of = OfArea { device: escaped(name), number: *number };
            size.get_or_create(&of).set(*bytes);
            used.get_or_create(&of).set(*leased);
        }
        registry.register("area_size_bytes", "Size of a swap area", size);
        registry.register("area_used_bytes", "Leased part of a swap area", used);
        let counters: Family<OfRun, Counter> = Family::default();
        for OneRun { launcher, program, view, .. } in &self.runs {
            for (counter, value) in view.stats.iter().filter(|(_, value)| **value > 0) {
                let of =
                    OfRun { pid: *launcher, program: escaped(program), counter: counter.clone() };
                counters.get_or_create(&of).inc_by(*value);
            }
        }
        registry.register(
            "run_events",
            "Counters of a run, under the kernel\'s names; those that are zero are left out",
            counters,
        );
        self.register_containers(&mut all);
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &all);
        text
    }

    fn register_groups(&self, registry: &mut Registry) {
        let (ram, swap, zswap, swapped, processes) = (
            Gauges::default(),
            Gauges::default(),
            Gauges::default(),
            Gauges::default(),
            Gauges::default(),
        );
        let events: Family<OfEvent, Counter> = Family::default();
        let stalled: Family<OfGroup, Counter<f64, AtomicU64>> = Family::default();
        for OneGroup { path, usage, leased, happened, pressure } in &self.groups {
            let of = OfGroup { group: escaped(path) };
            ram.get_or_create(&of).set(usage.ram);
            swap.get_or_create(&of).set(*leased);
            zswap.get_or_create(&of).set(usage.zswap);
            swapped.get_or_create(&of).set(usage.swapped);
            processes.get_or_create(&of).set(usage.processes.into());
            stalled.get_or_create(&of).inc_by(pressure.total_s());
            for (event, count) in [
                ("ram.high", happened.ram_high),
                ("ram.max", happened.ram_max),
                ("ram.low", happened.ram_low),
                ("swap.high", happened.swap_high),
                ("swap.max", happened.swap_max),
                ("swap.fail", happened.swap_fail),
            ] {
                events.get_or_create(&OfEvent { group: escaped(path), event }).inc_by(count);
            }
        }
        registry.register("group_ram_bytes", "Resident memory of a group and those below it", ram);
        registry.register(
            "group_swap_bytes",
            "Swap areas leased by a group and those below it",
            swap,
        );
        registry.register(
            "group_zswap_bytes",
            "Compressed memory of a group and those below it",
            zswap,
        );
        registry.register(
            "group_swapped_bytes",
            "Swapped memory of a group and those below it, uncompressed",
            swapped,
        );
        registry.register("group_processes", "Processes of a group and those below it", processes);
        registry.register(
            "group_stalled_seconds",
            "Time in which a thread of a group or one below it waited for memory that was swapped \
            out, or for room",
            stalled,
        );
        registry.register("group_events", "Events of a group and those below it", events);
    }

    /// What runs in containers have, under kubelet's names. Containers with the same names, as
    /// restarted ones for a moment, are added up.
    fn register_containers(&self, registry: &mut Registry) {
        let [working_set, rss, swap, peak, limit] = [(); 5].map(|()| Gauges::default());
        let failures: Family<OfFailure, Counter> = Family::default();
        for OneRun { container, view, .. } in &self.runs {
            let Some(labels) = container else { continue };
            let [container, pod, namespace] =
                [&labels.container, &labels.pod, &labels.namespace].map(|name| escaped(name));
            let sum = |bytes: fn(&ProcessView) -> u64| {
                view.processes.iter().map(bytes).fold(0, u64::saturating_add)
            };
            let charged = sum(|process| process.resident_bytes);
            let swapped = sum(|process| {
                process.swapped_pool_bytes.saturating_add(process.swapped_file_bytes)
            });
            let compressed = sum(|process| process.pool_bytes);
            let of = OfContainer {
                container: container.clone(),
                pod: pod.clone(),
                namespace: namespace.clone(),
            };
            for (gauges, bytes) in [
                (&working_set, charged),
                (&rss, charged.saturating_sub(compressed)),
                (&swap, swapped),
                (&peak, view.peak_resident_bytes),
                (&limit, view.budget_bytes),
            ] {
                gauges.get_or_create(&of).inc_by(bytes);
            }
            for (failure_type, name) in [("pgfault", "pgminfault"), ("pgmajfault", "pgmajfault")] {
                let of = OfFailure {
                    container: container.clone(),
                    pod: pod.clone(),
                    namespace: namespace.clone(),
                    failure_type,
                    scope: "container",
                };
                let count = view.stats.get(name).copied().unwrap_or(0);
                failures.get_or_create(&of).inc_by(count);
            }
        }
        for (name, help, gauges) in [
            (
                "container_memory_working_set_bytes",
                "Memory of a container that counts against its budget, compressed memory included",
                working_set,
            ),
            (
                "container_memory_rss",
                "Resident anonymous memory of a container in bytes, compressed memory not included",
                rss,
            ),
            ("container_memory_swap", "Swapped memory of a container in bytes, uncompressed", swap),
            (
                "container_memory_max_usage_bytes",
                "Most memory of a container so far that counted against its budget",
                peak,
            ),
            ("container_spec_memory_limit_bytes", "Budget of a container", limit),
        ] {
            registry.register(name, help, gauges);
        }
        registry.register(
            "container_memory_failures",
            "Faults of a container that swaptide served: of fresh pages (pgfault), and of pages \
            that were swapped out (pgmajfault)",
            failures,
        );
    }
}

/// A label's value as it stands between quotes: the encoder writes what it is given.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::psi::TimeShare;
    use std::time::Duration;

    #[test]
    fn numbers_come_as_openmetrics() {
        let usage = GroupUsage { ram: 5 << 20, processes: 2, ..GroupUsage::default() };
        let happened = Events { swap_max: 3, ..Events::default() };
        let mut pressure = Pressure::default();
        pressure.follow(TimeShare::of(250, Duration::from_millis(1)), Duration::from_secs(2));
        let process = ProcessView {
            resident_bytes: 5 << 20,
            pool_bytes: 1 << 20,
            swapped_pool_bytes: 3 << 20,
            swapped_file_bytes: 4 << 20,
            ..ProcessView::default()
        };
        let stats = [("zswpout", 7), ("zswpin", 0), ("pgmajfault", 9)];
        let view = View {
            stats: stats.map(|(name, count)| (name.to_owned(), count)).into(),
            budget_bytes: 64 << 20,
            peak_resident_bytes: 6 << 20,
            processes: vec![process.clone(), process],
            ..View::default()
        };
        let labels = ContainerLabels {
            container: "web".into(),
            pod: "front".into(),
            namespace: "a \"b\"".into(),
        };
        let run = |launcher, container| OneRun {
            launcher,
            program: "a \"b\"".into(),
            container,
            view: view.clone(),
        };
        let snapshot = MetricsSnapshot {
            budget: 1 << 30,
            groups: vec![OneGroup {
                path: "/web".into(),
                usage,
                leased: 4 << 20,
                happened,
                pressure,
            }],
            areas: vec![(0, "file:/var/tmp".into(), 1 << 30, 4 << 20)],
            runs: vec![run(77, None), run(78, Some(labels))],
        };
        let text = snapshot.text();
        let container = "{container=\"web\",pod=\"front\",namespace=\"a \\\"b\\\"\"}";
        let failures = |kind: &str| {
            container.replace('}', &format!(",failure_type=\"{kind}\",scope=\"container\"}}"))
        };
        for line in [
            "swaptide_budget_bytes 1073741824",
            "swaptide_group_ram_bytes{group=\"/web\"} 5242880",
            "swaptide_group_swap_bytes{group=\"/web\"} 4194304",
            "swaptide_group_stalled_seconds_total{group=\"/web\"} 0.5",
            "swaptide_group_processes{group=\"/web\"} 2",
            "swaptide_group_events_total{group=\"/web\",event=\"swap.max\"} 3",
            "swaptide_area_used_bytes{device=\"file:/var/tmp\",number=\"0\"} 4194304",
            "swaptide_run_events_total{pid=\"77\",program=\"a \\\"b\\\"\",counter=\"zswpout\"} 7",
            &format!("container_memory_working_set_bytes{container} 10485760"),
            &format!("container_memory_rss{container} 8388608"),
            &format!("container_memory_swap{container} 14680064"),
            &format!("container_memory_max_usage_bytes{container} 6291456"),
            &format!("container_spec_memory_limit_bytes{container} 67108864"),
            &format!("container_memory_failures_total{} 9", failures("pgmajfault")),
            &format!("container_memory_failures_total{} 0", failures("pgfault")),
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("zswpin"));
        assert_eq!(text.matches("# EOF").count(), 1);
        assert_eq!(text.matches("\ncontainer_memory_rss{").count(), 1, "one run is in a container");
    }
}
