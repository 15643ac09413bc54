//! The configuration of a run or a daemon, as a file in TOML.
//!
//! Owns the schema. Every mistake is told with file, line and key, and a file with a mistake
//! changes nothing: it is read and checked whole before any of it counts.
//!
//! ```toml
//! ram = "75%"
//! swap = ["zram:2G", "file:/var/tmp:16G,prio=100", "/dev/sdb2,prio=10"]
//! tiers = "+SSD:100 +HDD:-1"
//! userfaultfd = "same-user"
//!
//! [groups."/web"]
//! ram.max = "4G"
//! ram.low = "1G"
//! swap.tiers = "-HDD"
//!
//! [groups."/batch"]
//! zswap.writeback = true
//! swap.max = "32G"
//! owner = 1000
//! ```
//!
//! Locks: none.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Visitor};
use swaptide_core::Tiers;
use toml::Spanned;

use crate::cgroup::tree::{GroupError, GroupPath, GroupTree, Settings};
use crate::control::Users;
use crate::memctl::proactive::IdleReclaim;
use crate::swap::spec::{self, Device};
use crate::units::parse_share;

/// A mistake in a file.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {what}")]
pub struct ConfigError {
    /// The file, with the line where that is known.
    place: String,
    what: String,
}

/// A text, a number, or yes or no: whatever suits a value.
struct Value(String);

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Value, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a number, true or false")
            }

            fn visit_str<E>(self, text: &str) -> Result<Value, E> {
                Ok(Value(text.to_owned()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
                Ok(Value(number.to_string()))
            }

            fn visit_bool<E>(self, yes: bool) -> Result<Value, E> {
                Ok(Value(u8::from(yes).to_string()))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

type Item = Option<Spanned<Value>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    ram: Item,
    #[serde(default)]
    swap: Vec<Spanned<String>>,
    tiers: Option<Spanned<String>>,
    userfaultfd: Option<Spanned<String>>,
    #[serde(default)]
    groups: BTreeMap<Spanned<String>, GroupConfig>,
    #[serde(default)]
    daemon: Daemon,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupConfig {
    #[serde(default)]
    ram: Ram,
    #[serde(default)]
    swap: Swap,
    #[serde(default)]
    zswap: Zswap,
    owner: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ram {
    max: Item,
    high: Item,
    low: Item,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Swap {
    max: Item,
    high: Item,
    tiers: Item,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Zswap {
    max: Item,
    writeback: Item,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Daemon {
    state: Option<PathBuf>,
    metrics: Option<Spanned<String>>,
    idle: Option<Spanned<Idle>>,
    drain: Option<Spanned<u32>>,
    #[serde(default)]
    follow_forks: bool,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Idle {
    seconds: u32,
    refaults: u32,
    #[serde(default = "one_percent")]
    stall_ms: u32,
}

/// Milliseconds of a second.
fn one_percent() -> u32 {
    10
}

/// The longest time that runs may get at the daemon's end: a day.
const MAX_DRAIN_S: u32 = 24 * 60 * 60;

impl GroupConfig {
    fn items(&self) -> [(&'static str, &Item); 8] {
        [
            ("ram.max", &self.ram.max),
            ("ram.high", &self.ram.high),
            ("ram.low", &self.ram.low),
            ("swap.max", &self.swap.max),
            ("swap.high", &self.swap.high),
            ("swap.tiers", &self.swap.tiers),
            ("zswap.max", &self.zswap.max),
            ("zswap.writeback", &self.zswap.writeback),
        ]
    }
}

/// A group as a file wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPlan {
    /// The group's path: `/NAME/NAME`.
    pub path: GroupPath,
    /// Its settings.
    pub settings: Settings,
    /// The user that may change it, besides root.
    pub owner: Option<u32>,
}

/// Where metrics are to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsPlace {
    /// A Unix socket with this path.
    Socket(PathBuf),
    /// A port of this machine alone.
    Port(u16),
}

/// What a file says, checked.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The budget, as `--ram` takes it.
    pub ram: Option<String>,
    /// Devices, as `--swap` takes them.
    pub swap: Vec<String>,
    /// The devices of `swap`, read.
    pub devices: Vec<Device>,
    /// The tiers, as a text that makes them where there are none.
    pub tiers: String,
    /// The groups to make or change.
    pub groups: Vec<GroupPlan>,
    /// Directory of what a daemon keeps over its own restart.
    pub state: Option<PathBuf>,
    /// Where metrics are to be had.
    pub metrics: Option<MetricsPlace>,
    /// When idle groups lose memory.
    pub idle: Option<IdleReclaim>,
    /// Seconds that runs get to end in, when the daemon is told to end.
    pub drain_s: u32,
    /// Whose processes are helped to a userfaultfd.
    pub userfaultfd: Option<Users>,
    /// A daemon's runs follow forks themselves, though the kernel would report them to it.
    pub follow_forks: bool,
    /// Stands for the file's text: another number, another text.
    pub digest: u64,
}

impl Config {
    /// Reads and checks a file; percentages are of `ram` bytes.
    ///
    /// # Errors
    /// The first mistake.
    pub fn load(path: &Path, ram: u64) -> Result<Config, ConfigError> {
        let fail = |line, what| {
            let place = match line {
                0 => path.display().to_string(),
                line => format!("{}:{line}", path.display()),
            };
            ConfigError { place, what }
        };
        let text = std::fs::read_to_string(path)
            .map_err(|error| fail(0, format!("cannot be read: {error}")))?;
        let mut config = Config::parse(&text, ram).map_err(|(line, what)| fail(line, what))?;
        let mut hasher = std::hash::DefaultHasher::new();
        text.hash(&mut hasher);
        config.digest = hasher.finish();
        Ok(config)
    }

    /// Reads and checks a file's text.
    ///
    /// # Errors
    /// The first mistake, with its line (0: of none).
    pub fn parse(text: &str, ram: u64) -> Result<Config, (usize, String)> {
        let line = |span: Range<usize>| {
            1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count()
        };
        let file: File = toml::from_str(text).map_err(|error| {
            let message = error.message().split('\n').next().unwrap_or_default().to_owned();
            (error.span().map_or(0, line), message)
        })?;
        let mut config = Config::default();
        if let Some(budget) = &file.ram {
            parse_share(&budget.get_ref().0, ram)
                .map_err(|error| (line(budget.span()), format!("ram: {error}")))?;
            config.ram = Some(budget.get_ref().0.clone());
        }
        for device in &file.swap {
            let wrong = |error: spec::DeviceError| (line(device.span()), format!("swap: {error}"));
            config.devices.push(spec::parse(device.get_ref()).map_err(wrong)?);
            config.swap.push(device.get_ref().clone());
        }
        let mut tiers = Tiers::new();
        if let Some(text) = &file.tiers {
            tiers
                .apply(text.get_ref(), &[])
                .map_err(|error| (line(text.span()), format!("tiers: {error}")))?;
            config.tiers = tiers.spec();
        }
        for (name, group) in &file.groups {
            let path = GroupPath::parse(name.get_ref())
                .map_err(|error| (line(name.span()), format!("groups: {error}")))?;
            let mut settings = Settings::default();
            for (key, item) in group.items() {
                let Some(item) = item else { continue };
                let wrong =
                    |error| (line(item.span()), format!("groups.{:?}: {error}", path.as_str()));
                settings.set(key, &item.get_ref().0, &tiers, ram).map_err(wrong)?;
            }
            config.groups.push(GroupPlan { path, settings, owner: group.owner });
        }
        let users = file.userfaultfd.as_ref();
        config.userfaultfd = users
            .map(|users| {
                users
                    .get_ref()
                    .parse()
                    .map_err(|error| (line(users.span()), format!("userfaultfd: {error}")))
            })
            .transpose()?;
        config.state = file.daemon.state;
        config.follow_forks = file.daemon.follow_forks;
        config.metrics = file
            .daemon
            .metrics
            .map(|place| {
                metrics_place(place.get_ref()).ok_or((
                    line(place.span()),
                    format!(
                        "daemon.metrics: {:?} is neither an absolute path nor 127.0.0.1:PORT",
                        place.get_ref()
                    ),
                ))
            })
            .transpose()?;
        config.idle = file.daemon.idle.as_ref().map(|idle| idle.get_ref()).map(|idle| {
            IdleReclaim { after_s: idle.seconds, refaults: idle.refaults, stall_ms: idle.stall_ms }
        });
        if let Some(drain) = &file.daemon.drain {
            config.drain_s = *drain.get_ref();
            if config.drain_s > MAX_DRAIN_S {
                let wrong =
                    format!("daemon.drain: {} is more than {MAX_DRAIN_S} s", drain.get_ref());
                return Err((line(drain.span()), wrong));
            }
        }
        Ok(config)
    }

    /// Makes groups and tiers what the file says; groups that it does not name stay as they are.
    ///
    /// # Errors
    /// [`GroupError`]; nothing has changed then.
    pub fn apply(&self, groups: &mut GroupTree, owner: u32) -> Result<(), GroupError> {
        groups.check_room(self.groups.iter().map(|plan| &plan.path))?;
        groups.replace_tiers(&self.tiers)?;
        let after = *groups.tiers();
        for plan in &self.groups {
            let index = groups.ensure(&plan.path, plan.owner.unwrap_or(owner))?;
            // The file's masks are by the indices that its tiers had alone.
            let mut alone = Tiers::new();
            let excluded: Vec<String> = match alone.apply(&self.tiers, &[]) {
                Ok(_) => alone
                    .iter()
                    .filter(|t| !plan.settings.tiers.permits(Some(t.index)))
                    .map(|t| format!("-{}", t.name))
                    .collect(),
                Err(_) => Vec::new(),
            };
            let mut settings = Settings { tiers: swaptide_core::TierMask::ALL, ..plan.settings };
            if !excluded.is_empty() {
                settings.tiers.apply(&excluded.join(" "), &after).map_err(GroupError::Tiers)?;
            }
            groups.replace(index, settings, plan.owner);
        }
        Ok(())
    }
}

fn metrics_place(text: &str) -> Option<MetricsPlace> {
    if text.starts_with('/') {
        return Some(MetricsPlace::Socket(text.into()));
    }
    let port = text.strip_prefix("127.0.0.1:").or_else(|| text.strip_prefix("localhost:"))?;
    port.parse().ok().filter(|port| *port != 0).map(MetricsPlace::Port)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scratch, segment};

    const SOUND: &str = r#"
ram = "75%"
swap = ["zram:64M", "file:/var/tmp:1G,prio=100"]
tiers = "+SSD:100 +HDD:50 +NET:-1"

[groups."/web"]
ram.max = "1G"
ram.low = "25%"
swap.tiers = "-HDD"

[groups."/web/front"]
ram.high = 1048576
zswap.writeback = false
swap.max = "max"
owner = 1000

[daemon]
state = "/var/lib/swaptide"
metrics = "127.0.0.1:9469"
idle = { seconds = 60, refaults = 10 }
drain = 30
follow_forks = true
"#;

    #[test]
    fn a_sound_file_is_read_whole() {
        let config = Config::parse(SOUND, 1 << 32).expect("sound");
        assert_eq!(
            (config.swap.len(), config.groups.len(), config.tiers.as_str()),
            (2, 2, "+SSD:100 +HDD:50 +NET:-1")
        );
        assert_eq!(config.groups[0].settings.ram_low, 1 << 30);
        assert_eq!(config.groups[1].settings.ram_high, Some(1 << 20));
        assert!(!config.groups[1].settings.zswap_writeback);
        assert_eq!(config.groups[1].owner, Some(1000));
        assert_eq!(config.metrics, Some(MetricsPlace::Port(9469)));
        assert!(config.follow_forks && !Config::default().follow_forks);
        assert_eq!(config.idle, Some(IdleReclaim { after_s: 60, refaults: 10, stall_ms: 10 }));
        assert_eq!(config.drain_s, 30);
        let mut groups = GroupTree::new(segment(), 1 << 32);
        config.apply(&mut groups, 7).expect("applied");
        let front = groups.find(&GroupPath::parse("/web/front").expect("path")).expect("group");
        assert_eq!(groups.view(front).values["swap.tiers.effective"], "SSD NET");
        assert_eq!(groups.get(front).expect("group").owner, 1000);
        assert!(Config::parse("", 1 << 32).expect("an empty file").groups.is_empty());
    }

    #[test]
    fn every_mistake_is_told_with_its_line_and_key() {
        for (text, line, part) in [
            ("ram = \"lots\"", 1, "ram: \"lots\""),
            ("\nram = 1\nrom = 2", 3, "unknown field `rom`"),
            ("swap = [\"zram:1G\",\n \"tape:1\"]", 2, "swap: \"tape:1\""),
            ("tiers = \"+SSD:100\"", 1, "tiers: the lowest tier, SSD"),
            ("tiers = \"+SSD:-1 SSD\"", 1, "token 2, \"SSD\""),
            ("\n[groups.web]", 2, "\"web\" is not the path"),
            ("[groups.\"/web\"]\n\nram.max = \"1Q\"", 3, "groups.\"/web\": ram.max: \"1Q\""),
            ("[groups.\"/web\"]\nram.most = 1", 2, "unknown field `most`"),
            ("[groups.\"/web\"]\nswap.tiers = \"-SSD\"", 2, "swap.tiers: token 1, \"-SSD\""),
            ("[groups.\"/web\"]\nzswap.writeback = 7", 2, "zswap.writeback"),
            ("[groups.\"/web\"]\nram = \"1G\"", 2, "expected"),
            ("[daemon]\nmetrics = \"0.0.0.0:80\"", 2, "daemon.metrics"),
            ("[daemon]\nidle = { seconds = 1 }", 2, "missing field `refaults`"),
            ("[daemon]\ndrain = \"1h\"", 2, "expected u32"),
            ("[daemon]\n\ndrain = 86401", 3, "daemon.drain: 86401 is more than 86400 s"),
            ("[daemon]\nfollow_forks = 1", 2, "expected a boolean"),
            ("ram = \"1G", 1, ""),
        ] {
            let (at, what) = Config::parse(text, 1 << 32).expect_err(text);
            assert_eq!(at, line, "{text}: {what}");
            assert!(what.contains(part) && !what.contains('\n'), "{text}: {what}");
        }
        let scratch = Scratch::new("config");
        let path = scratch.path("swaptide.toml");
        assert!(
            Config::load(&path, 1)
                .expect_err("missing")
                .to_string()
                .contains("swaptide.toml: cannot be read")
        );
        std::fs::write(&path, "\n\nwhat = 1").expect("write");
        assert!(
            Config::load(&path, 1)
                .expect_err("mistake")
                .to_string()
                .contains("swaptide.toml:3: unknown field `what`")
        );
    }

    #[test]
    fn a_reloaded_file_changes_all_that_it_names_and_keeps_indices() {
        let mut groups = GroupTree::new(segment(), 1 << 32);
        Config::parse(SOUND, 1 << 32).expect("sound").apply(&mut groups, 7).expect("applied");
        let other = "tiers = \"+NET:-1 +SSD:200\"\n[groups.\"/web\"]\nswap.tiers = \
            \"-NET\"\nram.max = \"2G\"";
        Config::parse(other, 1 << 32).expect("sound").apply(&mut groups, 7).expect("applied");
        let web = groups.find(&GroupPath::parse("/web").expect("path")).expect("group");
        let view = groups.view(web).values;
        assert_eq!(
            (view["swap.tiers"].as_str(), view["ram.max"].as_str(), view["ram.low"].as_str()),
            ("SSD", "2147483648", "0")
        );
    }
}
