//! Sizes as people write them, and the amount of memory that a percentage is of.
//!
//! Owns the grammar: a number, with decimals if you like, then one of `B K M G T P` (also `KB`,
//! `KiB` and so on, in either case, always powers of 1024) or, where it is allowed, `%`.

use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SizeError {
    /// Not a number with a unit.
    #[error("{0:?} is not a size; write it like 512M, 1.5G or 50%")]
    Syntax(String),
    /// Zero, or less than one byte.
    #[error("{0:?} is not more than zero; write a size like 512M")]
    Zero(String),
    /// More than fits 63 bits.
    #[error("{0:?} is too large; write a size below 8388608T")]
    TooLarge(String),
    /// A percentage where none makes sense.
    #[error(
        "{0:?} is a percentage, which is not allowed here; write a size like \
        4G"
    )]
    Percent(String),
}

/// Bytes of a size like `512M`, `1.5GiB`, `65536`.
///
/// # Errors
/// See [`SizeError`]; a percentage is one.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    match split(text)? {
        (_, "%") => Err(SizeError::Percent(text.to_owned())),
        (number, unit) => {
            scale(text, number, shift(unit).ok_or_else(|| SizeError::Syntax(text.to_owned()))?)
        }
    }
}

/// Bytes of a size or of a percentage of `whole`.
///
/// # Errors
/// See [`SizeError`].
pub fn parse_share(text: &str, whole: u64) -> Result<u64, SizeError> {
    match split(text)? {
        (number, "%") => {
            let bytes = number / 100.0 * whole as f64;
            if bytes < 1.0 {
                return Err(SizeError::Zero(text.to_owned()));
            }
            if number > 10_000.0 {
                return Err(SizeError::TooLarge(text.to_owned()));
            }
            Ok(bytes as u64)
        }
        _ => parse_bytes(text),
    }
}

fn split(text: &str) -> Result<(f64, &str), SizeError> {
    let trimmed = text.trim();
    let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let plain = number.starts_with(|c: char| c.is_ascii_digit()) && !number.ends_with('.');
    match number.parse::<f64>() {
        Ok(number) if plain => Ok((number, unit.trim())),
        _ => Err(SizeError::Syntax(text.to_owned())),
    }
}

fn shift(unit: &str) -> Option<u32> {
    let lower = unit.to_ascii_lowercase();
    let prefix = match lower.as_str() {
        "" | "b" => return Some(0),
        two if two.len() == 1 => two,
        with_unit => with_unit.strip_suffix("ib").or_else(|| with_unit.strip_suffix('b'))?,
    };
    ["k", "m", "g", "t", "p"].iter().position(|p| *p == prefix).map(|at| (at as u32 + 1) * 10)
}

fn scale(text: &str, number: f64, shift: u32) -> Result<u64, SizeError> {
    let bytes = number * (1u64 << shift) as f64;
    if bytes >= i64::MAX as f64 {
        return Err(SizeError::TooLarge(text.to_owned()));
    }
    if bytes < 1.0 {
        return Err(SizeError::Zero(text.to_owned()));
    }
    Ok(bytes as u64)
}

/// A size for people: three figures at most, one decimal under ten.
pub fn human(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1023.5 && unit < 5 {
        value /= 1024.0;
        unit += 1;
    }
    let name = ["B", "K", "M", "G", "T", "P"][unit];
    if unit > 0 && value < 9.95 { format!("{value:.1}{name}") } else { format!("{value:.0}{name}") }
}

/// A count for people: `950`, `12k`, `3.4M`.
pub fn human_count(count: u64) -> String {
    let (value, name) = match count {
        0..1_000 => return count.to_string(),
        1_000..1_000_000 => (count as f64 / 1e3, "k"),
        1_000_000..1_000_000_000 => (count as f64 / 1e6, "M"),
        _ => (count as f64 / 1e9, "G"),
    };
    if value < 9.95 { format!("{value:.1}{name}") } else { format!("{value:.0}{name}") }
}

/// The memory that a budget in percent is a share of: the machine's, or less where a memory cgroup
/// allows less.
pub fn ram_total() -> u64 {
    let total = swaptide_sys::process::mem_total().unwrap_or(1 << 30);
    cgroup_limit().map_or(total, |limit| limit.min(total))
}

/// The smallest memory limit of this process's cgroup and the ones above it, of version 2 or 1.
fn cgroup_limit() -> Option<u64> {
    each_cgroup(|limit, _| limit)
}

/// The least that this process's cgroup, or one above it, still has room for. What the kernel can
/// give up of files counts as free.
pub(crate) fn cgroup_room() -> Option<u64> {
    each_cgroup(|limit, directory| {
        let number = |file: &str| {
            std::fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok()
        };
        let Some(used) = number("memory.current").or_else(|| number("memory.usage_in_bytes"))
        else {
            return limit;
        };
        let stat = std::fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
        let files = |name: &str| {
            stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
        };
        let files = files("total_inactive_file ").or_else(|| files("inactive_file ")).unwrap_or(0);
        limit.saturating_sub(used.saturating_sub(files))
    })
}

/// The smallest that `f` makes of the limits of this process's cgroup and the ones above it, and
/// their directories.
fn each_cgroup(f: impl Fn(u64, &Path) -> u64) -> Option<u64> {
    limiting_cgroups().iter().filter_map(|(directory, limit)| Some(f((*limit)?, directory))).min()
}

/// The memory cgroups that this process is in, of version 2 or 1: the directory of each, and its
/// limit if it has one now.
pub(crate) fn limiting_cgroups() -> Vec<(PathBuf, Option<u64>)> {
    let mut found = Vec::new();
    for line in std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|c| c == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let mut path = Path::new(path);
        loop {
            let directory = Path::new(root).join(path.strip_prefix("/").unwrap_or(path));
            if let Ok(text) = std::fs::read_to_string(directory.join(file)) {
                found.push((directory, text.trim().parse().ok()));
            }
            match path.parent() {
                Some(parent) => path = parent,
                None => break,
            }
        }
    }
    found
}

/// The items with commas between them.
pub fn comma_list<T: ToString>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_usual_ways_to_write_a_size() {
        for (text, bytes) in [
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("2G", 2 << 30),
            ("1.5G", 3 << 29),
            ("1.5GiB", 3 << 29),
            ("64KB", 64 << 10),
            ("65536", 65536),
            ("65536b", 65536),
            ("1T", 1 << 40),
            (" 8 M ", 8 << 20),
            ("0.5K", 512),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_size_refused_by_kind() {
        for text in [
            "", "M", "-5M", "5X", "5 apples", "1e9", "1..5G", ".5G", "5.", "0x10", "inf", "NaN",
            "5MM", "ib", "1ib", "5é",
        ] {
            assert!(
                matches!(parse_bytes(text), Err(SizeError::Syntax(_))),
                "{text}: {:?}",
                parse_bytes(text)
            );
        }
        assert!(matches!(parse_bytes("0"), Err(SizeError::Zero(_))));
        assert!(matches!(parse_bytes("0.0001K"), Err(SizeError::Zero(_))));
        assert!(matches!(parse_bytes("99999999999P"), Err(SizeError::TooLarge(_))));
        assert!(matches!(parse_bytes("50%"), Err(SizeError::Percent(_))));
        assert!(matches!(parse_share("0%", 1 << 30), Err(SizeError::Zero(_))));
        assert!(matches!(parse_share("20000%", 1 << 30), Err(SizeError::TooLarge(_))));
    }

    #[test]
    fn a_percentage_is_of_the_whole() {
        assert_eq!(parse_share("50%", 4 << 30), Ok(2 << 30));
        assert_eq!(parse_share("12.5 %", 8 << 30), Ok(1 << 30));
        assert_eq!(parse_share("64M", 4 << 30), Ok(64 << 20));
    }

    #[test]
    fn sizes_for_people() {
        for (bytes, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1.0K"),
            (512 << 20, "512M"),
            ((19 << 30) / 10, "1.9G"),
            ((1 << 30) - 1, "1.0G"),
        ] {
            assert_eq!(human(bytes), text);
        }
        for (count, text) in
            [(7, "7"), (999, "999"), (1200, "1.2k"), (120_000, "120k"), (3_400_000, "3.4M")]
        {
            assert_eq!(human_count(count), text);
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,12}") {
            let _ = parse_share(&text, 1 << 34);
        }

        #[test]
        fn plain_bytes_and_kibibytes_come_back_exactly(n in 1u64..1 << 40) {
            prop_assert_eq!(parse_bytes(&n.to_string()), Ok(n));
            prop_assert_eq!(parse_bytes(&format!("{n}KiB")), Ok(n << 10));
        }
    }
}
