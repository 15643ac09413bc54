//! Where a result goes: a table or JSON on standard output, files.

use std::io::Write;
use std::path::Path;

use clap::builder::styling::Style;

const TITLE: Style = Style::new().bold();

/// True if `--json` names no file: JSON takes the table's place on standard output.
pub fn is_stdout(file: &Path) -> bool {
    file == Path::new("-")
}

/// Prints a table below its title, which is bold where colors are shown. A reader that went away
/// has seen enough, and is no reason to lose the files.
pub fn print_titled(text: &str) {
    let (title, rest) = text.split_once('\n').unwrap_or((text, ""));
    let _ = write!(anstream::stdout(), "{TITLE}{title}{TITLE:#}\n{rest}");
}
