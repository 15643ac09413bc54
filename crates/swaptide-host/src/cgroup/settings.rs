//! What can be set of a group, by its name and as text.

use swaptide_core::{TierError, TierMask, Tiers};

use crate::units::{SizeError, parse_bytes, parse_share};

/// The limits of a group, and its protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Tiers that are not excluded here; what is excluded above is excluded all the same.
    pub tiers: TierMask,
    /// Bytes of memory that it may have; `None`: no bound.
    pub ram_max: Option<u64>,
    /// Memory from which on limits go down.
    pub ram_high: Option<u64>,
    /// Memory that is kept for the group, as far as it uses it.
    pub ram_low: u64,
    /// Most bytes of swap areas.
    pub swap_max: Option<u64>,
    /// Bytes of swap areas from which on it is counted.
    pub swap_high: Option<u64>,
    /// Most bytes of compressed memory, compressed.
    pub zswap_max: Option<u64>,
    /// True if anything goes to the swap areas.
    pub zswap_writeback: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            tiers: TierMask::ALL,
            ram_max: None,
            ram_high: None,
            ram_low: 0,
            swap_max: None,
            swap_high: None,
            zswap_max: None,
            zswap_writeback: true,
        }
    }
}

/// Keys that can only be read.
pub(crate) const READ_ONLY: [&str; 9] = [
    "swap.tiers.effective",
    "ram.current",
    "swap.current",
    "zswap.current",
    "ram.events",
    "swap.events",
    "processes",
    "swapped.current",
    "ram.pressure",
];

/// Every key that can be set.
pub const KEYS: [&str; 8] = [
    "swap.tiers",
    "ram.max",
    "ram.high",
    "ram.low",
    "swap.max",
    "swap.high",
    "zswap.max",
    "zswap.writeback",
];

/// Why a key, which is named first, cannot be set so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// The group has no such key.
    #[error("there is no {0:?}; a group has {keys}", keys = KEYS.join(", "))]
    Unknown(String),
    /// A key that can only be read.
    #[error("{0} is read-only; swaptide ctl group --help lists what can be set")]
    ReadOnly(String),
    /// Not `max` and no size.
    #[error("{0}: {1}, or max for no bound")]
    Size(String, SizeError),
    /// Neither 0 nor 1.
    #[error("{0}: {1:?} is neither 0 nor 1; write one of them")]
    Switch(String, String),
    /// Not a change of the tiers.
    #[error("{0}: {1}")]
    Tiers(String, TierError),
}

impl Settings {
    /// Sets one key. Sizes of memory may be percentages of `ram`.
    ///
    /// # Errors
    /// [`SettingError`]; nothing is changed then.
    pub fn set(
        &mut self,
        key: &str,
        value: &str,
        tiers: &Tiers,
        ram: u64,
    ) -> Result<(), SettingError> {
        let name = || key.to_owned();
        let share = |text: &str| {
            bytes(text, |text| parse_share(text, ram))
                .map_err(|error| SettingError::Size(name(), error))
        };
        let size = |text: &str| {
            bytes(text, parse_bytes).map_err(|error| SettingError::Size(name(), error))
        };
        match key {
            "swap.tiers" => self
                .tiers
                .apply(value, tiers)
                .map_err(|error| SettingError::Tiers(name(), error))?,
            "ram.max" => self.ram_max = share(value)?,
            "ram.high" => self.ram_high = share(value)?,
            "ram.low" => self.ram_low = share(value)?.unwrap_or(u64::MAX),
            "swap.max" => self.swap_max = size(value)?,
            "swap.high" => self.swap_high = size(value)?,
            "zswap.max" => self.zswap_max = size(value)?,
            "zswap.writeback" => {
                self.zswap_writeback = match value.trim() {
                    "0" => false,
                    "1" => true,
                    other => return Err(SettingError::Switch(name(), other.to_owned())),
                }
            }
            _ if READ_ONLY.contains(&key) => return Err(SettingError::ReadOnly(name())),
            _ => return Err(SettingError::Unknown(name())),
        }
        Ok(())
    }

    /// A key's value as it is read; `None` for a key that cannot be set.
    pub fn get(&self, key: &str, tiers: &Tiers) -> Option<String> {
        let bound =
            |bytes: Option<u64>| bytes.map_or_else(|| "max".to_owned(), |bytes| bytes.to_string());
        Some(match key {
            "swap.tiers" => self.tiers.names(tiers),
            "ram.max" => bound(self.ram_max),
            "ram.high" => bound(self.ram_high),
            "ram.low" => bound(Some(self.ram_low).filter(|low| *low < u64::MAX)),
            "swap.max" => bound(self.swap_max),
            "swap.high" => bound(self.swap_high),
            "zswap.max" => bound(self.zswap_max),
            "zswap.writeback" => u8::from(self.zswap_writeback).to_string(),
            _ => return None,
        })
    }
}

impl Settings {
    /// The text that sets a key to what it is; where it is not what it is in the beginning.
    pub fn as_set(&self, key: &str, tiers: &Tiers) -> Option<String> {
        if key == "swap.tiers" {
            let excluded = tiers
                .iter()
                .filter(|tier| !self.tiers.permits(Some(tier.index)))
                .map(|tier| format!("-{}", tier.name));
            return Some(excluded.collect::<Vec<_>>().join(" ")).filter(|text| !text.is_empty());
        }
        let value = self.get(key, tiers);
        value.filter(|value| Settings::default().get(key, tiers).as_ref() != Some(value))
    }
}

/// `max` is no bound, `0` is none at all.
fn bytes(
    text: &str,
    read: impl Fn(&str) -> Result<u64, SizeError>,
) -> Result<Option<u64>, SizeError> {
    match text.trim() {
        "max" => Ok(None),
        zero if !zero.is_empty() && zero.bytes().all(|byte| byte == b'0') => Ok(Some(0)),
        size => read(size).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn settings_round_trip() {
        let mut tiers = Tiers::new();
        tiers.apply("+SSD:100 +HDD:50 +NET:-1", &[]).expect("tiers");
        let mut settings = Settings::default();
        for (key, value, read) in [
            ("ram.max", "2G", "2147483648"),
            ("ram.high", "50%", "536870912"),
            ("ram.low", "64M", "67108864"),
            ("swap.max", "0", "0"),
            ("swap.high", " 1.5G ", "1610612736"),
            ("zswap.max", "000", "0"),
            ("zswap.writeback", "0", "0"),
            ("swap.tiers", "-HDD -NET", "SSD"),
            ("swap.tiers", "+HDD", "SSD HDD"),
            ("swap.tiers", "", "SSD HDD NET"),
            ("ram.max", "max", "max"),
            ("ram.low", "max", "max"),
            ("swap.max", "max", "max"),
            ("zswap.writeback", "1", "1"),
        ] {
            settings.set(key, value, &tiers, GIB).expect(key);
            assert_eq!(settings.get(key, &tiers).as_deref(), Some(read), "{key}={value}");
        }
        for key in KEYS {
            let value = settings.get(key, &tiers).expect("a key that can be set can be read");
            if key != "swap.tiers" {
                let before = settings;
                settings.set(key, &value, &tiers, GIB).expect(key);
                assert_eq!(settings, before, "{key}={value}");
            }
        }
        assert_eq!(settings.get("ram.current", &tiers), None);
        settings.set("swap.tiers", "-HDD", &tiers, GIB).expect("mask");
        let mut again = Settings::default();
        for key in KEYS {
            if let Some(value) = settings.as_set(key, &tiers) {
                again.set(key, &value, &tiers, GIB).expect(key);
            }
        }
        assert_eq!(again, settings);
    }

    #[test]
    fn rejected_setting_names_key_and_reason() {
        let tiers = Tiers::new();
        let mut settings = Settings::default();
        for (key, value, part) in [
            ("ram.maximum", "1G", "there is no \"ram.maximum\""),
            ("ram.current", "1G", "is read-only"),
            ("ram.max", "lots", "not a size"),
            ("ram.max", "", "not a size"),
            ("ram.max", "-1", "not a size"),
            ("swap.max", "50%", "not allowed here"),
            ("zswap.writeback", "yes", "neither 0 nor 1"),
            ("swap.tiers", "-SSD", "no tier of this name"),
            ("swap.tiers", "SSD", "\"SSD\""),
        ] {
            let error = settings.set(key, value, &tiers, GIB).expect_err(key).to_string();
            assert!(
                error.contains(part) && error.contains(key) && !error.contains('\n'),
                "{error}"
            );
            assert_eq!(settings, Settings::default());
        }
    }
}
