//! Measurements of two sides that take turns, and a directory for them.

use std::path::{Path, PathBuf};

use swaptide_bench::{Restorer, Undo, UndoScope};

use crate::report::Row;

use crate::programs::job::Took;

/// Measurements of both sides, in the order of their turns.
#[derive(Default)]
pub struct Pairs {
    before: Vec<Took>,
    after: Vec<Took>,
}

pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Sample standard deviation.
pub(crate) fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    (squares / (values.len().max(2) - 1) as f64).sqrt()
}

pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// What the second of two neighbours gave by what the first gave.
pub(crate) fn ratios<T>(before: &[T], after: &[T], f: impl Fn(&T) -> f64) -> Vec<f64> {
    before.iter().zip(after).map(|(before, after)| f(after) / f(before).max(1e-9)).collect()
}

/// The median of ratios, and half the width of the range in which it lies with a certainty of 95%.
pub(crate) fn middle_of(ratios: &[f64]) -> (f64, f64) {
    let middle = median(ratios);
    let spread = median(&ratios.iter().map(|ratio| (ratio - middle).abs()).collect::<Vec<_>>());
    // The median of n values deviates by 1.253 of their deviation by the root of n; that is 1.483
    // times the spread.
    (middle, 1.96 * 1.253 * 1.483 * spread / (ratios.len().max(1) as f64).sqrt())
}

/// The row of such a ratio, in per cent, with its bounds as deviation.
pub(crate) fn ratio_row(case: &str, metric: &str, ratio: (f64, f64)) -> Row {
    Row::new(case, metric, "%", 100.0, ratio.0 * 100.0).with_deviations(0.0, ratio.1 * 100.0)
}

impl Pairs {
    /// One more of a side.
    pub fn push(&mut self, before: bool, took: Took) {
        if before { &mut self.before } else { &mut self.after }.push(took);
    }

    /// A row of both means.
    pub fn row(&self, case: &str, metric: &str, unit: &str, f: impl Fn(&Took) -> f64) -> Row {
        let of = |side: &[Took]| side.iter().map(&f).collect::<Vec<f64>>();
        let (before, after) = (of(&self.before), of(&self.after));
        Row::new(case, metric, unit, mean(&before), mean(&after))
            .with_deviations(deviation(&before), deviation(&after))
    }

    /// After by before, of each pair.
    pub(crate) fn ratios(&self, f: impl Fn(&Took) -> f64) -> Vec<f64> {
        ratios(&self.before, &self.after, f)
    }

    /// The middle of [`Pairs::ratios`], as [`middle_of`] tells it.
    pub(crate) fn ratio(&self, f: impl Fn(&Took) -> f64) -> (f64, f64) {
        middle_of(&self.ratios(f))
    }
}

/// A directory on a disk that goes when this is dropped, or a signal ends the call.
pub struct ScratchDir {
    path: PathBuf,
    _scope: UndoScope,
}

impl ScratchDir {
    /// A new one.
    ///
    /// # Errors
    /// Why there is none.
    pub fn new(restorer: &Restorer, name: &str) -> Result<ScratchDir, String> {
        let place =
            swaptide_host::swap::spec::default_places().into_iter().find(|place| place.is_dir());
        let path = place
            .ok_or("no directory for temporary files")?
            .join(format!("swaptide-lab-{name}-{}", std::process::id()));
        let scope = restorer.scope();
        restorer.change(Undo::RemoveTree(path.clone()), |_| {
            std::fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))
        })?;
        Ok(ScratchDir { path, _scope: scope })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_of_neighbours_and_one_outlier_does_not_move_it() {
        let took = |cpu_s| Took { cpu_s, ..Took::default() };
        let mut pairs = Pairs::default();
        for (before, after) in [(1.0, 1.01), (2.0, 2.02), (4.0, 4.04), (1.0, 9.0), (8.0, 8.08)] {
            pairs.push(true, took(before));
            pairs.push(false, took(after));
        }
        let (ratio, half) = pairs.ratio(|took| took.cpu_s);
        assert!((ratio - 1.01).abs() < 1e-9 && half < 1e-9, "{ratio} {half}");
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(deviation(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]), (32.0f64 / 7.0).sqrt());
    }

    #[test]
    fn one_bad_pair_moves_the_middle_of_ratios_hardly() {
        assert_eq!(middle_of(&[1.0; 9]), (1.0, 0.0));
        let (middle, half) = middle_of(&[0.9, 1.0, 1.1, 1.0, 9.0]);
        assert_eq!(middle, 1.0);
        // The spread is 0.1.
        assert!((half - 1.96 * 1.253 * 1.483 * 0.1 / 5f64.sqrt()).abs() < 1e-9, "{half}");
        assert_eq!(middle_of(&[]), (0.0, 0.0));
    }
}
