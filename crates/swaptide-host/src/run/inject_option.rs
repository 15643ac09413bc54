//! Which programs that load no library a run manages.
//!
//! Locks: none.

/// Which programs that load no library are given the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inject {
    /// Those that have some memory.
    #[default]
    Large,
    /// All, as soon as they are seen.
    Always,
    /// None: they are not managed.
    Never,
}

impl std::str::FromStr for Inject {
    type Err = String;

    fn from_str(text: &str) -> Result<Inject, String> {
        match text {
            "large" => Ok(Inject::Large),
            "always" => Ok(Inject::Always),
            "never" => Ok(Inject::Never),
            _ => Err(format!("{text:?}: expected large, always or never")),
        }
    }
}

impl Inject {
    /// The bytes from which on a program is given the agent, in a run with this budget.
    pub(super) fn least_bytes(self, budget: u64) -> u64 {
        match self {
            Inject::Large => (budget / 32).clamp(4 << 20, 32 << 20),
            Inject::Always | Inject::Never => 0,
        }
    }
}
