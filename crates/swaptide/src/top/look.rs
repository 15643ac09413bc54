//! What `swaptide top` looks at: the frame's parts, the order of processes.

use std::cmp::Reverse;

use clap::ValueEnum;
use swaptide_host::control::watch::{Rates, Scene};
use swaptide_host::report::totals::ProcessView;

use crate::top::history::{Sample, TopHistory};

/// What processes are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortKey {
    /// Memory, resident and swapped
    #[default]
    Size,
    /// Memory that counts against the budget
    Resident,
    /// Pages that come back, a second
    In,
    /// Pages that go out, a second
    Out,
    /// Faults a second
    Faults,
    /// Part of the time in which a thread waits for memory
    Waits,
    /// Process number
    Pid,
}

impl SortKey {
    pub(crate) fn of_key(key: char) -> Option<SortKey> {
        Some(match key {
            's' => SortKey::Size,
            'r' => SortKey::Resident,
            'i' => SortKey::In,
            'o' => SortKey::Out,
            'f' => SortKey::Faults,
            'w' => SortKey::Waits,
            'p' => SortKey::Pid,
            _ => return None,
        })
    }

    pub(crate) fn next(self) -> SortKey {
        let all = SortKey::value_variants();
        let at = all.iter().position(|key| *key == self).unwrap_or(0);
        all[(at + 1) % all.len()]
    }
}

/// What is looked at, and how.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Look {
    /// The order of processes.
    pub(crate) sort: SortKey,
    /// The process that is chosen, by its place in that order.
    pub(crate) cursor: Option<usize>,
    /// The process that is shown alone.
    pub(crate) one: Option<u32>,
    /// There are keys.
    pub(crate) is_live: bool,
    /// There are no colors.
    pub(crate) is_plain: bool,
}

/// A process and what goes with it.
pub(crate) struct ProcessRow<'a> {
    /// The program that the user started.
    pub(crate) program: &'a str,
    pub(crate) process: &'a ProcessView,
    pub(crate) sample: Sample,
}

/// The processes, in their order.
pub(crate) fn ordered<'a>(
    scene: &'a Scene,
    history: &TopHistory,
    sort: SortKey,
) -> Vec<ProcessRow<'a>> {
    let mut all: Vec<ProcessRow<'a>> = scene
        .runs
        .iter()
        .flat_map(|run| run.processes.iter().map(|process| (run.program.as_str(), process)))
        .map(|(program, process)| ProcessRow {
            program,
            process,
            sample: history.newest(process.pid),
        })
        .collect();
    all.sort_by_key(|ProcessRow { process: p, sample, .. }| {
        let value = match sort {
            // In memory or not.
            SortKey::Size => p.resident_bytes + p.swapped_pool_bytes + p.swapped_file_bytes,
            SortKey::Resident => p.resident_bytes,
            SortKey::In => sample.pages_in,
            SortKey::Out => sample.pages_out,
            SortKey::Faults => sample.faults,
            SortKey::Waits => sample.waits,
            SortKey::Pid => 0,
        };
        (Reverse(value), p.pid)
    });
    all
}

/// What is drawn.
pub(crate) struct Frame<'a> {
    pub(crate) scene: &'a Scene,
    pub(crate) rates: Rates,
    pub(crate) history: &'a TopHistory,
    pub(crate) look: Look,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use swaptide_host::cgroup::tree::GroupView;
    use swaptide_host::control::server::TierRow;
    use swaptide_host::report::totals::View;
    use swaptide_host::swap::areas::AreaView;

    /// A run with two processes in one group, and an area.
    pub(crate) fn scene() -> Scene {
        let process = |pid, resident_bytes| ProcessView {
            pid,
            group: "/web".into(),
            state: "engaged".into(),
            limit_bytes: 64 << 20,
            resident_bytes,
            ..ProcessView::default()
        };
        let run = View {
            pid: 40,
            program: "server".into(),
            processes: vec![process(41, 10 << 20), process(42, 50 << 20)],
            ..View::default()
        };
        let area = AreaView {
            name: "nbd://host/x".into(),
            kind: "nbd".into(),
            priority: 7,
            size_bytes: 4 << 30,
            used_bytes: 2 << 20,
            state: "away".into(),
            ..AreaView::default()
        };
        let values = [("processes", "2"), ("ram.current", "62914560"), ("ram.max", "max")];
        let group = GroupView {
            path: "/web".into(),
            values: values
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        };
        Scene {
            daemon: false,
            budget_bytes: 128 << 20,
            resident_bytes: 64 << 20,
            runs: vec![run],
            areas: vec![(3, area)],
            tiers: vec![TierRow { name: "NET".into(), index: 0, start: -1, end: 99 }],
            groups: vec![group],
            at: None,
        }
    }

    #[test]
    fn processes_are_in_the_order_of_the_key() {
        let (mut scene, mut history) = (scene(), TopHistory::default());
        let begin = std::time::Instant::now();
        scene.at = Some(begin);
        history.add(&scene);
        scene.at = Some(begin + std::time::Duration::from_secs(1));
        scene.runs[0].processes[0].pages_in = 9;
        scene.runs[0].processes[1].faults = 5;
        history.add(&scene);
        for (sort, first) in [
            (SortKey::Size, 42),
            (SortKey::In, 41),
            (SortKey::Faults, 42),
            (SortKey::Out, 41),
            (SortKey::Pid, 41),
        ] {
            assert_eq!(ordered(&scene, &history, sort)[0].process.pid, first, "{sort:?}");
        }
    }
}
