//! Ticks of axes, and how values are written.

use swaptide_host::units::{human, human_count};

/// An axis of bytes goes up to this at least.
const LEAST_BYTES: f64 = (1u64 << 20) as f64;

/// What an axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AxisUnit {
    Bytes,
    PerSecond,
    Percent,
}

impl AxisUnit {
    /// A value with its unit.
    pub(crate) fn write(self, value: f64) -> String {
        match self {
            AxisUnit::Bytes => human(value as u64),
            AxisUnit::PerSecond => format!("{}/s", number(value)),
            AxisUnit::Percent => format!("{} %", number(value)),
        }
    }

    /// A value at a tick.
    pub(crate) fn tick(self, value: f64) -> String {
        match self {
            _ if value == 0.0 => "0".into(),
            AxisUnit::Bytes => human(value as u64),
            AxisUnit::PerSecond => number(value),
            AxisUnit::Percent => format!("{} %", number(value)),
        }
    }
}

/// A number without a unit.
fn number(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        ..0.095 => format!("{value:.2}"),
        ..9.95 => format!("{value:.1}").trim_end_matches(".0").to_owned(),
        _ => human_count(value.round() as u64),
    }
}

/// An axis from 0 on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Axis {
    /// From one tick to the next.
    pub(crate) step: f64,
    /// Its end: no value is above it.
    pub(crate) end: f64,
}

impl Axis {
    /// For values up to `most`, with two to five steps.
    pub(crate) fn of(unit: AxisUnit, most: f64) -> Axis {
        let step = match unit {
            AxisUnit::Bytes => {
                // No address space has more.
                let most = most.clamp(LEAST_BYTES, 2f64.powi(62));
                let least = (most / 4.0).max(1.0);
                2f64.powi(least.log2().ceil() as i32)
            }
            AxisUnit::PerSecond | AxisUnit::Percent => decimal_step(most.max(1.0) / 4.0),
        };
        let end = ((most / step).ceil() * step).max(step * 2.0);
        Axis { step, end: if unit == AxisUnit::Percent { end.min(100.0).max(most) } else { end } }
    }

    pub(crate) fn ticks(self) -> impl Iterator<Item = f64> {
        let count = (self.end / self.step + 0.001).floor().min(20.0) as u32;
        (0..=count).map(move |at| f64::from(at) * self.step)
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `least`.
fn decimal_step(least: f64) -> f64 {
    let power = 10f64.powi(least.log10().floor() as i32);
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps.into_iter().find(|step| *step >= least * 0.999_999).unwrap_or(power * 10.0)
}

/// An axis of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TimeAxis {
    /// In seconds; not at a tick.
    pub(crate) end: f64,
    step: f64,
    /// Seconds of the unit that ticks are in.
    unit: f64,
    name: &'static str,
}

impl TimeAxis {
    /// Up to a number of seconds.
    pub(crate) fn of(seconds: f64) -> TimeAxis {
        let end = seconds.max(1e-3);
        let (unit, name) = match end {
            ..180.0 => (1.0, "s"),
            ..10_800.0 => (60.0, "min"),
            ..259_200.0 => (3600.0, "h"),
            _ => (86_400.0, "d"),
        };
        TimeAxis { end, step: decimal_step(end / unit / 5.0), unit, name }
    }

    /// Each tick in seconds, and its text.
    pub(crate) fn ticks(self) -> impl Iterator<Item = (f64, String)> {
        let count = (self.end / self.unit / self.step + 0.001).floor().min(20.0) as u32;
        (0..=count).map(move |at| {
            let value = f64::from(at) * self.step;
            let digits = (-self.step.log10().floor()).max(0.0) as usize;
            (value * self.unit, format!("{value:.digits$} {}", self.name))
        })
    }
}

/// A length of time in words.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match whole {
        0..120 => format!("{seconds:.1} s"),
        120..7200 => format!("{} min {} s", whole / 60, whole % 60),
        7200..172_800 => format!("{} h {} min", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86_400, whole / 3600 % 24),
    }
}

/// A moment in words, in UTC.
pub(crate) fn moment(unix_s: f64) -> String {
    let in_range = (0.0..2e11).contains(&unix_s).then_some(unix_s as i64);
    let time = in_range.and_then(|s| time::OffsetDateTime::from_unix_timestamp(s).ok());
    time.map_or_else(
        || "unknown".into(),
        |at| {
            let (date, clock) = (at.date(), at.time());
            format!(
                "{:04}-{:02}-{:02} {:02}:{:02}:{:02} UTC",
                date.year(),
                u8::from(date.month()),
                date.day(),
                clock.hour(),
                clock.minute(),
                clock.second()
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn axes_end_at_round_values() {
        let ticks = |unit: AxisUnit, most: f64| {
            Axis::of(unit, most).ticks().map(|tick| unit.tick(tick)).collect::<Vec<_>>().join(" ")
        };
        let mib = f64::from(1 << 20);
        assert_eq!(ticks(AxisUnit::Bytes, 65.0 * mib), "0 32M 64M 96M");
        assert_eq!(ticks(AxisUnit::Bytes, 1024.0 * mib), "0 256M 512M 768M 1.0G");
        assert_eq!(ticks(AxisUnit::PerSecond, 12_345.0), "0 5.0k 10k 15k");
        assert_eq!(ticks(AxisUnit::Percent, 100.0), "0 50 % 100 %");
        assert_eq!(ticks(AxisUnit::Percent, 3.2), "0 1 % 2 % 3 % 4 %");
        assert_eq!(ticks(AxisUnit::PerSecond, 0.0), "0 0.5 1");
        assert_eq!(ticks(AxisUnit::Bytes, 0.0), "0 256K 512K");
    }

    #[test]
    fn times_have_the_unit_that_fits() {
        let ticks = |seconds: f64| {
            TimeAxis::of(seconds).ticks().map(|(_, text)| text).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(ticks(0.6), "0.0 s 0.2 s 0.4 s 0.6 s");
        assert_eq!(ticks(60.0), "0 s 20 s 40 s 60 s");
        assert_eq!(ticks(604_800.0), "0 d 2 d 4 d 6 d");
        for (seconds, text) in [
            (0.25, "0.2 s"),
            (61.04, "61.0 s"),
            (3661.0, "61 min 1 s"),
            (90_000.0, "25 h 0 min"),
            (604_800.0, "7 d 0 h"),
        ] {
            assert_eq!(duration(seconds), text);
        }
        assert_eq!(moment(1_795_910_400.7), "2026-11-29 00:00:00 UTC");
        assert_eq!(moment(f64::MAX), "unknown");
        assert_eq!(moment(-1.0), "unknown");
    }

    proptest! {
        #[test]
        fn an_axis_holds_its_values_with_few_ticks(most in 0f64..1e19) {
            for unit in [AxisUnit::Bytes, AxisUnit::PerSecond] {
                let axis = Axis::of(unit, most.min(4e18));
                prop_assert!(axis.end >= most.min(4e18) && axis.end > 0.0);
                prop_assert!((3..=6).contains(&axis.ticks().count()), "{axis:?}");
            }
            let times = TimeAxis::of(most.min(3e10)).ticks().count();
            prop_assert!((2..=7).contains(&times) || most < 1e-3, "{times}");
        }
    }
}
