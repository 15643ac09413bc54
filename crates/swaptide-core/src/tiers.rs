//! Tiers: named ranges of the priorities of swap devices, and the masks by which groups are kept
//! off some of them. (docs/linux-swap.md, "Tiers")
//!
//! A tier is a name and the priority it starts at; it ends below the start of the next higher tier,
//! the highest at [`Priority::MAX`]. What tier a device is in follows from its priority alone.
//!
//! Text that changes tiers is a list of tokens, with blanks or commas between them, carried out
//! from left to right:
//!
//! | token        | does | the range |
//! |--------------|------|-----------|
//! | `+NAME:PRIO` | adds a tier | splits the tier that held PRIO: the new one takes PRIO and above |
//! | `-NAME`      | removes one | goes to the next lower tier; the lowest tier's to the next higher one |
//! | `NAME:PRIO`  | moves the start of one | goes to, or comes from, its neighbours |
//!
//! Text that changes a mask is a list of `-NAME` (excludes) and `+NAME` (takes the exclusion back),
//! with blanks between; no token at all takes back every exclusion.
//!
//! Invariants
//! 1. A text is carried out whole or not at all.
//! 2. Either there is no tier, or the lowest starts at -1: every priority is in exactly one. Within
//!    a text this may be otherwise; it is looked at once, after the last token.
//! 3. No token moves a device in use from its tier to another, or takes its tier away. Devices that
//!    were in no tier (there was none) are bound by nothing.
//! 4. A tier keeps its index as long as it lives, and with it its bit in all masks. When it goes,
//!    its owner sets the bit in every mask ([`Applied::freed`]), so that a later tier of the same
//!    index begins permitted.
//! 5. A child's effective mask is its own one within its parent's effective mask.
//!
//! Locks: none. Nothing here is needed to allocate: a write computes, an allocation compares one
//! word.

use core::fmt;

/// Most tiers at one time.
pub const MAX_TIERS: usize = 8;
/// Longest name of a tier in bytes.
pub const MAX_TIER_NAME: usize = 15;
/// The bit that stands for devices in no tier.
const NO_TIER: u32 = 31;

/// The priority of a swap device, from -1 to 32767; the higher one is used first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Priority(i16);

impl Priority {
    /// -1, the lowest priority.
    pub const MIN: Priority = Priority(-1);
    /// 32767, as for swapon(8).
    pub const MAX: Priority = Priority(i16::MAX);

    /// The priority of a number; `None` for one that is out of range.
    pub fn new(number: i32) -> Option<Priority> {
        let number = i16::try_from(number).ok()?;
        (number >= Self::MIN.0).then_some(Priority(number))
    }

    /// From -1 to 32767.
    pub fn get(self) -> i32 {
        self.0.into()
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a tier among the [`MAX_TIERS`], and its bit in masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TierIndex(u8);

impl TierIndex {
    /// From 0 to one less than [`MAX_TIERS`].
    pub fn get(self) -> u32 {
        self.0.into()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct TierName {
    bytes: [u8; MAX_TIER_NAME],
    len: u8,
}

impl TierName {
    fn new(text: &str) -> Result<TierName, Rule> {
        if text.len() > MAX_TIER_NAME {
            return Err(Rule::LongName);
        }
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        {
            return Err(Rule::BadName);
        }
        let mut bytes = [0; MAX_TIER_NAME];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(TierName { bytes, len: text.len() as u8 })
    }

    fn as_str(&self) -> &str {
        // Only ASCII was let in.
        core::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Tier {
    name: TierName,
    start: Priority,
}

/// A tier as it is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierView<'a> {
    /// Letters, digits and `_`, as it was defined.
    pub name: &'a str,
    /// Its bit in a [`TierMask`].
    pub index: TierIndex,
    /// The lowest priority that belongs to it.
    pub start: Priority,
    /// The highest priority that belongs to it.
    pub end: Priority,
}

/// The rule that a token broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rule {
    /// It is none of the three kinds (for a mask: has no sign).
    #[error(
        "not a change; write +NAME:PRIO, -NAME or NAME:PRIO for tiers, +NAME or -NAME for a group"
    )]
    Grammar,
    /// The name is empty or has other characters than letters, digits and underscores.
    #[error("a tier's name has letters, digits and underscores only; choose another name")]
    BadName,
    /// The name is longer than [`MAX_TIER_NAME`].
    #[error("a tier's name has at most {MAX_TIER_NAME} bytes; shorten it")]
    LongName,
    /// The text after the colon is no number from -1 to 32767.
    #[error(
        "the text after the colon is no priority; write a number from {} to {}",
        Priority::MIN,
        Priority::MAX
    )]
    BadPriority,
    /// A tier of this name exists.
    #[error("a tier of this name exists; write it without the + to move its start")]
    NameTaken,
    /// Another tier starts there.
    #[error("another tier starts at this priority; choose another one")]
    StartTaken,
    /// There are [`MAX_TIERS`] already.
    #[error("there are {MAX_TIERS} tiers already; remove one first")]
    Full,
    /// No tier has this name.
    #[error("there is no tier of this name; swaptide ctl tiers lists them")]
    Unknown,
    /// A device in use would be in another tier or in none.
    #[error("a device of priority {0} is in use and would change its tier; take it away first")]
    InUse(Priority),
    /// After the last token, the lowest tier starts above -1.
    #[error("priorities from -1 to {} are in no tier; let one start at -1", .0.get() - 1)]
    Uncovered(Priority),
}

/// A text that cannot be carried out. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {rule}", self.place())]
pub struct TierError {
    /// The token at fault; for [`Rule::Uncovered`] the name of the lowest tier.
    pub token: String,
    /// Its number in the text, from 1.
    pub number: usize,
    /// The fault found.
    pub rule: Rule,
}

impl TierError {
    fn place(&self) -> String {
        let TierError { token, number, rule } = self;
        match rule {
            Rule::Uncovered(start) => format!("the lowest tier, {token}, starts at {start}"),
            _ => format!("token {number}, {token:?}"),
        }
    }
}

/// The result of applying a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Bits of tiers that were removed: to be set in every mask ([`TierMask::forget`]).
    pub freed: u32,
}

/// All tiers of a host or a run.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Tiers {
    places: [Option<Tier>; MAX_TIERS],
}

impl fmt::Debug for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tiers({})", self.spec())
    }
}

impl Tiers {
    /// Without any tier: masks have no effect.
    pub fn new() -> Tiers {
        Tiers::default()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// The tiers, highest first.
    pub fn iter(&self) -> impl Iterator<Item = TierView<'_>> {
        let mut order: [Option<(TierIndex, &Tier)>; MAX_TIERS] = [None; MAX_TIERS];
        for (at, place) in self.places.iter().enumerate() {
            order[at] = place.as_ref().map(|tier| (TierIndex(at as u8), tier));
        }
        order.sort_unstable_by_key(|place| core::cmp::Reverse(place.map(|(_, tier)| tier.start)));
        let mut end = Priority::MAX;
        order.into_iter().flatten().map(move |(index, tier)| {
            let view = TierView { name: tier.name.as_str(), index, start: tier.start, end };
            // Of the lowest tier this would be -2, which is not looked at.
            end = Priority(tier.start.0 - 1);
            view
        })
    }

    /// The tier of a priority; `None` when there are no tiers.
    pub fn tier_of(&self, priority: Priority) -> Option<TierIndex> {
        self.iter().find(|tier| tier.start <= priority).map(|tier| tier.index)
    }

    /// The tier of a name.
    pub fn find(&self, name: &str) -> Option<TierIndex> {
        self.iter().find(|tier| tier.name == name).map(|tier| tier.index)
    }

    /// Carries out a text; `devices` are the priorities of those in use.
    ///
    /// # Errors
    /// The first token that breaks a rule, and which; nothing is changed then.
    pub fn apply(&mut self, text: &str, devices: &[Priority]) -> Result<Applied, TierError> {
        let before = *self;
        let mut next = before;
        let mut applied = Applied::default();
        let tokens = text
            .split(|c: char| c == ',' || c.is_ascii_whitespace())
            .filter(|token| !token.is_empty());
        let mut last = 0;
        for (at, token) in tokens.enumerate() {
            last = at + 1;
            let failed = |rule| TierError { token: token.to_owned(), number: at + 1, rule };
            next.change(token, &mut applied).map_err(failed)?;
            let moved = devices.iter().find(|device| match before.tier_of(**device) {
                Some(tier) => !next.still_in(**device, tier, applied),
                None => false,
            });
            if let Some(device) = moved {
                return Err(failed(Rule::InUse(*device)));
            }
        }
        if let Some(lowest) = next.iter().last().filter(|lowest| lowest.start > Priority::MIN) {
            return Err(TierError {
                token: lowest.name.to_owned(),
                number: last,
                rule: Rule::Uncovered(lowest.start),
            });
        }
        *self = next;
        Ok(applied)
    }

    /// Has those tiers that a text makes where there are none, instead of these; one that both have
    /// keeps its index. `devices` are the priorities of those in use.
    ///
    /// # Errors
    /// As [`Tiers::apply`]; for a device that would be in a tier of another name, the token is the
    /// name of its present one.
    pub fn replace(&mut self, text: &str, devices: &[Priority]) -> Result<Applied, TierError> {
        let mut fresh = Tiers::new();
        fresh.apply(text, &[])?;
        let mut next = Tiers::new();
        for tier in fresh.places.iter().flatten() {
            if let Some(index) = self.find(tier.name.as_str()) {
                next.places[usize::from(index.0)] = Some(*tier);
            }
        }
        for tier in
            fresh.places.iter().flatten().filter(|tier| self.find(tier.name.as_str()).is_none())
        {
            if let Some(free) = next.places.iter_mut().find(|place| place.is_none()) {
                *free = Some(*tier);
            }
        }
        for device in devices {
            let (old, new) = (self.name_of(*device), next.name_of(*device));
            if let Some(old) = old.filter(|old| new != Some(*old)) {
                return Err(TierError {
                    token: old.to_owned(),
                    number: 1,
                    rule: Rule::InUse(*device),
                });
            }
        }
        let gone = self.iter().filter(|tier| next.find(tier.name).is_none());
        let applied = Applied { freed: gone.fold(0, |freed, tier| freed | 1 << tier.index.get()) };
        *self = next;
        Ok(applied)
    }

    fn name_of(&self, priority: Priority) -> Option<&str> {
        self.iter().find(|tier| tier.start <= priority).map(|tier| tier.name)
    }

    /// A tier that was removed and added again is another one, even where it has the same index.
    fn still_in(&self, device: Priority, tier: TierIndex, applied: Applied) -> bool {
        applied.freed & (1 << tier.get()) == 0 && self.tier_of(device) == Some(tier)
    }

    fn change(&mut self, token: &str, applied: &mut Applied) -> Result<(), Rule> {
        if let Some(rest) = token.strip_prefix('+') {
            let (name, start) = named_start(rest)?;
            self.add(name, start)
        } else if let Some(name) = token.strip_prefix('-') {
            let index = self.known(TierName::new(name)?)?;
            self.remove(index);
            applied.freed |= 1 << index.get();
            Ok(())
        } else {
            let (name, start) = named_start(token)?;
            let index = self.known(name)?;
            self.set_start(index, start)
        }
    }

    fn known(&self, name: TierName) -> Result<TierIndex, Rule> {
        self.find(name.as_str()).ok_or(Rule::Unknown)
    }

    fn add(&mut self, name: TierName, start: Priority) -> Result<(), Rule> {
        if self.find(name.as_str()).is_some() {
            return Err(Rule::NameTaken);
        }
        if self.iter().any(|tier| tier.start == start) {
            return Err(Rule::StartTaken);
        }
        let free = self.places.iter_mut().find(|place| place.is_none()).ok_or(Rule::Full)?;
        *free = Some(Tier { name, start });
        Ok(())
    }

    fn remove(&mut self, index: TierIndex) {
        let gone = self.places[usize::from(index.0)].take();
        // The next lower tier reaches up by itself; below the lowest there is none, so the next
        // higher one reaches down.
        if gone.is_some_and(|tier| tier.start == Priority::MIN)
            && let Some(successor) = self.iter().last().map(|tier| tier.index)
        {
            self.place_start(successor, Priority::MIN);
        }
    }

    fn set_start(&mut self, index: TierIndex, start: Priority) -> Result<(), Rule> {
        if self.iter().any(|tier| tier.start == start && tier.index != index) {
            return Err(Rule::StartTaken);
        }
        self.place_start(index, start);
        Ok(())
    }

    fn place_start(&mut self, index: TierIndex, start: Priority) {
        if let Some(tier) = &mut self.places[usize::from(index.0)] {
            tier.start = start;
        }
    }

    /// A text that makes these tiers where there are none; with the same indices if no index
    /// between theirs is free.
    pub fn spec(&self) -> String {
        let tokens: Vec<String> = self
            .places
            .iter()
            .flatten()
            .map(|tier| format!("+{}:{}", tier.name.as_str(), tier.start))
            .collect();
        tokens.join(" ")
    }
}

/// The list, highest tier first, in the columns of the kernel's own.
impl fmt::Display for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<16}{:<5}{:<11}PrioEnd", "Name", "Idx", "PrioStart")?;
        for tier in self.iter() {
            writeln!(
                f,
                "{:<16}{:<5}{:<11}{}",
                tier.name,
                tier.index.get(),
                tier.start.get(),
                tier.end
            )?;
        }
        Ok(())
    }
}

fn named_start(text: &str) -> Result<(TierName, Priority), Rule> {
    let (name, number) = text.split_once(':').ok_or(Rule::Grammar)?;
    let name = TierName::new(name)?;
    let digits = number.strip_prefix('-').unwrap_or(number);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Rule::BadPriority);
    }
    let start = number.parse().ok().and_then(Priority::new).ok_or(Rule::BadPriority)?;
    Ok((name, start))
}

/// The permitted tiers: a bit for each index, and one for devices in no tier, which nothing
/// excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TierMask(u32);

impl Default for TierMask {
    fn default() -> TierMask {
        TierMask::ALL
    }
}

impl TierMask {
    /// Permits all tiers, those defined later too.
    pub const ALL: TierMask = TierMask(u32::MAX);

    /// True if devices of a tier may be used (`None`: devices in no tier).
    pub fn permits(self, tier: Option<TierIndex>) -> bool {
        self.0 & (1 << tier.map_or(NO_TIER, TierIndex::get)) != 0
    }

    /// True if devices of this priority may be used.
    pub fn permits_priority(self, tiers: &Tiers, priority: Priority) -> bool {
        self.permits(tiers.tier_of(priority))
    }

    /// Returns the effective mask below a parent with that effective mask.
    #[must_use]
    pub fn within(self, parent: TierMask) -> TierMask {
        TierMask(self.0 & parent.0)
    }

    /// Forgets the exclusions of tiers that are gone ([`Applied::freed`]).
    pub fn forget(&mut self, freed: u32) {
        self.0 |= freed;
    }

    /// Carries out a text of `-NAME` and `+NAME`; one without tokens permits everything.
    ///
    /// # Errors
    /// The first token that breaks a rule, and which; nothing is changed then.
    pub fn apply(&mut self, text: &str, tiers: &Tiers) -> Result<(), TierError> {
        let mut next = *self;
        let mut any = false;
        for (at, token) in text.split_ascii_whitespace().enumerate() {
            any = true;
            let failed = |rule| TierError { token: token.to_owned(), number: at + 1, rule };
            let (excludes, name) = match (token.strip_prefix('-'), token.strip_prefix('+')) {
                (Some(name), _) => (true, name),
                (_, Some(name)) => (false, name),
                _ => return Err(failed(Rule::Grammar)),
            };
            let name = TierName::new(name).map_err(failed)?;
            let bit = 1 << tiers.known(name).map_err(failed)?.get();
            next.0 = if excludes { next.0 & !bit } else { next.0 | bit };
        }
        *self = if any { next } else { TierMask::ALL };
        Ok(())
    }

    /// Names of the permitted tiers, highest first, with blanks between.
    pub fn names(self, tiers: &Tiers) -> String {
        let names: Vec<&str> = tiers
            .iter()
            .filter(|tier| self.permits(Some(tier.index)))
            .map(|tier| tier.name)
            .collect();
        names.join(" ")
    }
}

#[cfg(test)]
mod tests;
