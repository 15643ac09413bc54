//! What promises cost: encryption, forks with everything swapped out, a database's dump in the
//! background.

use super::report::{Better, Report, SWAPTIDE, Stats, human};
use super::run::{Job, Outcome};
use super::workload::{Content, Phase};
use super::{Bench, Failure, Runs, beside_itself};

impl Bench<'_> {
    /// What encrypting costs: nothing but a file to swap to, with and without.
    pub(super) fn cipher(&self) -> Result<Report, Failure> {
        let data = self.args.data.unwrap_or(1 << 30);
        // What hardly shrinks is the most to encrypt for each page.
        let content = self.args.ratio.first().copied().unwrap_or(Content::One);
        let job = Job { content, ..self.job(data, &[Phase::Fill, Phase::Seq]) };
        let file = format!("file:{}:{}", self.runner.dir.display(), 2 * data);
        let plain = format!("{file},cipher=none");
        let (mut without, mut with) = (Runs::default(), Runs::default());
        for run in 1..=self.runs {
            // Who goes first takes turns, too.
            let turns = [(&mut without, &plain), (&mut with, &file)];
            let turns =
                if run % 2 == 1 { turns.into() } else { Vec::from_iter(turns.into_iter().rev()) };
            for (runs, area) in turns {
                self.say(area, self.ram, run);
                let outcome = self.runner.swaptide_on(Some(area), &job, self.ram)?;
                runs.add(outcome.total_mb_per_s(), self.ram, &outcome);
            }
        }
        let title = format!(
            "{} of data {} in {}, {} runs",
            human(data),
            content.describe(),
            human(self.ram),
            self.runs
        );
        let mut report = self.report("cipher", &title, "MB/s", Better::Higher, data);
        report.pairs.push(beside_itself("cipher=none", without.side(None)?, with.side(None)?));
        report.notes.push(
            "growth and refault in order together; the only swap space is an unlinked file".into(),
        );
        report
            .notes
            .push("with cipher=none pages are authenticated all the same, by a keyed hash".into());
        Ok(report)
    }

    /// What a fork costs when nothing of the parent is resident, beside one of which everything is.
    pub(super) fn fork(&self) -> Result<Report, Failure> {
        let data = self.args.data.unwrap_or(1 << 30);
        let resident = self.job(data, &[Phase::Fill, Phase::Fork]);
        let out = Job { look: true, ..self.job(data, &[Phase::Fill, Phase::Out, Phase::Fork]) };
        // Tight enough that the program is served, and room for what is compressed.
        let ram = self.args.ram.unwrap_or(data / 2);
        let value = |o: &Outcome| {
            let done = o.phases.iter().find(|p| p.phase == Phase::Fork).filter(|p| p.pages > 0);
            done.map(|p| p.seconds / p.pages as f64 * 1e3).ok_or("nothing was forked".to_owned())
        };
        let (mut without, mut with) = (Runs::default(), Runs::default());
        for run in 1..=self.runs {
            self.say("without swaptide", ram, run);
            let outcome = self.runner.plain(&resident)?;
            without.add(value(&outcome)?, 0, &outcome);
            self.say(SWAPTIDE, ram, run);
            let outcome = self.runner.swaptide(&out, ram)?;
            let out = outcome.held.pages + outcome.held.beyond;
            if out < data / 20 * 19 {
                let text = format!("only {} of {} were swapped out", human(out), human(data));
                return Err(Failure(1, text));
            }
            with.add(value(&outcome)?, ram, &outcome);
        }
        let title = format!(
            "a fork with {} resident, and with it swapped out, {} runs",
            human(data),
            self.runs
        );
        let mut report = self.report("fork", &title, "ms", Better::Lower, data);
        report.pairs.push(beside_itself("without-swaptide", without.side(None)?, with.side(None)?));
        report.notes.push(
            "from the fork until its child, which ends at once, was waited for; the \
            mean of ten in a run"
                .into(),
        );
        Ok(report)
    }

    /// A dump in the background, half of what it reads swapped out.
    pub(super) fn bgsave(&self) -> Result<Report, Failure> {
        let data = self.args.data.unwrap_or(2 * self.ram);
        let job = self.job(data, &[Phase::Redis, Phase::Bgsave, Phase::Bgsave, Phase::Bgsave]);
        let value = |o: &Outcome| {
            let saves: Vec<f64> = o
                .phases
                .iter()
                .filter(|p| p.phase == Phase::Bgsave && !p.capped)
                .map(|p| p.seconds)
                .collect();
            Stats::of(&saves).map(|s| s.median).ok_or("no dump was completed".to_owned())
        };
        let title = format!(
            "a Redis server with {} of values in {}, {} runs",
            human(data),
            human(self.ram),
            self.runs
        );
        let mut report = self.report("bgsave", &title, "s", Better::Lower, data);
        for &peer in &self.peers {
            report.pairs.push(self.beside(peer, &job, self.ram, Better::Lower, &value)?.0);
        }
        if self.peers.is_empty() {
            report.alone = Some(self.ours(&job, self.ram, &value)?.side(None)?);
        }
        report.notes.push("the median of three dumps one after the other in each run".into());
        self.note_peers(&mut report);
        Ok(report)
    }
}
