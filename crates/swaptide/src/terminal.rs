//! What the command prints for people: colors where a terminal shows them, plain text elsewhere.
//!
//! The choice is made once, by [`choose`]; every stream that is written through `anstream` keeps to
//! it. Text for scripts (`--json`, completions, what `awk` cuts) has no colors to begin with.

use std::io::Write;

use anstream::ColorChoice;
use clap::ValueEnum;
use clap::builder::styling::{AnsiColor, Style};

/// `--color`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    /// On a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    /// Everywhere
    Always,
    /// Nowhere
    Never,
}

/// What is right, as in a check that passed.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default().bold();
/// What is wrong.
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();
/// What is to be looked at.
pub(crate) const DOUBTFUL: Style = AnsiColor::Yellow.on_default();
/// The head of a table.
pub(crate) const HEAD: Style = Style::new().bold();

/// Has all output follow `color` from now on.
pub(crate) fn choose(color: Color) {
    match color {
        Color::Auto => ColorChoice::Auto,
        Color::Always => ColorChoice::AlwaysAnsi,
        Color::Never => ColorChoice::Never,
    }
    .write_global();
}

/// The word of a `--color` among arguments that clap has not accepted: help is printed, too, where
/// there is nothing to parse. Looks no further than the command of a run.
pub(crate) fn asked(words: impl IntoIterator<Item = String>) -> Color {
    let mut words = words.into_iter().take_while(|word| word != "--");
    while let Some(word) = words.next() {
        let value = match word.strip_prefix("--color") {
            Some("") => words.next(),
            Some(rest) => rest.strip_prefix('=').map(str::to_owned),
            None => None,
        };
        if let Some(color) = value.and_then(|value| Color::from_str(&value, false).ok()) {
            return color;
        }
    }
    Color::Auto
}

/// True if what goes to standard output is shown in colors.
pub(crate) fn is_colored() -> bool {
    anstream::AutoStream::choice(&std::io::stdout()) != ColorChoice::Never
}

/// `text` in a style.
pub(crate) fn styled(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

/// A value as scripts read it.
pub(crate) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).map_or_else(|error| error.to_string(), |text| text + "\n")
}

/// Prints to standard output; a reader that went away has seen enough.
pub(crate) fn print(text: &str) {
    let _ = anstream::stdout().write_all(text.as_bytes());
}

/// Prints a line to standard error.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(anstream::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_is_found_before_a_programs_own() {
        for (line, color) in [
            ("run --color never --help", Color::Never),
            ("--color=always ctl", Color::Always),
            ("run -- ls --color=always", Color::Auto),
            ("--color", Color::Auto),
            ("--colors=always", Color::Auto),
            ("--color sometimes", Color::Auto),
        ] {
            assert_eq!(asked(line.split(' ').map(str::to_owned)), color, "{line}");
        }
    }

    #[test]
    fn styles_end_where_they_are_to() {
        let text = styled(GOOD, "ok");
        assert!(text.starts_with("\x1b[") && text.ends_with("\x1b[0m"), "{text:?}");
        assert_eq!(anstream::adapter::strip_str(&text).to_string(), "ok");
    }
}
