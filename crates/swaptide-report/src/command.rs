//! The command line: what is read, where the pictures go.
//!
//! Invariants
//! 1. Nothing is written before everything was read and drawn.
//! 2. No file is replaced without `--force`, and no report at all.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Args;
use swaptide_host::report::totals::Sink;
use thiserror::Error;

use crate::page::page;
use crate::saved::{MAX_REPORT_BYTES, NotAReport, SavedReport};
use crate::svg::picture;

/// Most reports that are drawn side by side.
const MAX_RUNS: usize = 16;

/// Arguments of `swaptide report`.
#[derive(Debug, Clone, Args)]
pub struct ReportArgs {
    /// Files that swaptide run --report has written; several are drawn side by side, at most 16
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Write one HTML page, which needs no network; - is standard output [default, without --svg:
    /// the name of the first FILE with .html at its end]
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
    /// Write one SVG picture; - is standard output
    #[arg(long, value_name = "OUT")]
    svg: Option<PathBuf>,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
}

/// Why nothing was drawn.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DrawError {
    /// A report cannot be read.
    #[error("{path}: cannot be read: {1}", path = .0.display())]
    Read(PathBuf, io::Error),
    /// A file is too large.
    #[error("{path}: too large for a report (more than 16M)", path = .0.display())]
    Large(PathBuf),
    /// A file is something else.
    #[error("{path}: {1}", path = .0.display())]
    Other(PathBuf, NotAReport),
    /// More than fit next to each other.
    #[error("{0} reports are too many to be drawn side by side; give at most 16")]
    TooMany(usize),
    /// A picture would replace something.
    #[error("{path}: exists; give another name, or --force to replace it", path = .0.display())]
    Exists(PathBuf),
    /// A picture would replace a report.
    #[error("{path}: is one of the reports; give another name", path = .0.display())]
    IsReport(PathBuf),
    /// Both pictures would be in one place.
    #[error("--html and --svg: both to {path}; give two names", path = .0.display())]
    SamePlace(PathBuf),
    /// A picture cannot be written.
    #[error("{path}: cannot be written: {1}; give another name", path = .0.display())]
    Write(PathBuf, io::Error),
}

/// Where a picture goes.
enum OutputPlace {
    Stdout,
    Path(PathBuf, Sink),
}

impl OutputPlace {
    /// Looks whether it can go there, and changes nothing.
    fn open(path: &Path, args: &ReportArgs) -> Result<OutputPlace, DrawError> {
        if path == Path::new("-") {
            return Ok(OutputPlace::Stdout);
        }
        if let Ok(found) = std::fs::metadata(path) {
            let same = |file: &PathBuf| {
                let file = std::fs::metadata(file);
                file.is_ok_and(|file| (file.dev(), file.ino()) == (found.dev(), found.ino()))
            };
            if args.files.iter().any(same) {
                return Err(DrawError::IsReport(path.to_owned()));
            }
            if found.is_file() && !args.force {
                return Err(DrawError::Exists(path.to_owned()));
            }
        }
        let sink = Sink::open(path).map_err(|error| DrawError::Write(path.to_owned(), error))?;
        Ok(OutputPlace::Path(path.to_owned(), sink))
    }

    fn write(self, text: &str) -> Result<(), DrawError> {
        match self {
            OutputPlace::Stdout => match io::stdout().write_all(text.as_bytes()) {
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                    Err(DrawError::Write("standard output".into(), error))
                }
                _ => Ok(()),
            },
            OutputPlace::Path(path, mut sink) => {
                let written = sink.write_text(text.as_bytes());
                written.map_err(|error| DrawError::Write(path.clone(), error))?;
                let _ = writeln!(io::stderr(), "swaptide report: wrote {}", path.display());
                Ok(())
            }
        }
    }
}

fn read(path: &Path) -> Result<(String, SavedReport), DrawError> {
    let failed = |error| DrawError::Read(path.to_owned(), error);
    let mut text = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_REPORT_BYTES + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_REPORT_BYTES {
        return Err(DrawError::Large(path.to_owned()));
    }
    let run = SavedReport::parse(&text).map_err(|why| DrawError::Other(path.to_owned(), why))?;
    Ok((path.display().to_string(), run))
}

/// Where the pictures go: HTML, SVG.
fn outputs(args: &ReportArgs) -> (Option<PathBuf>, Option<PathBuf>) {
    let html = match (&args.html, &args.svg, args.files.first()) {
        (None, None, Some(first)) => Some(first.with_extension("html")),
        (html, ..) => html.clone(),
    };
    (html, args.svg.clone())
}

/// Draws what the arguments ask for.
///
/// # Errors
/// See [`DrawError`]: nothing was written, but where a device fails while it is written to.
pub fn main(args: &ReportArgs) -> Result<(), DrawError> {
    if args.files.len() > MAX_RUNS {
        return Err(DrawError::TooMany(args.files.len()));
    }
    let runs = args.files.iter().map(|file| read(file)).collect::<Result<Vec<_>, _>>()?;
    let (html, svg) = outputs(args);
    if let (Some(html), Some(svg)) = (&html, &svg)
        && std::path::absolute(html).ok() == std::path::absolute(svg).ok()
    {
        return Err(DrawError::SamePlace(html.clone()));
    }
    let open = |path: Option<PathBuf>| path.map(|path| OutputPlace::open(&path, args)).transpose();
    let (html, svg) = (open(html)?, open(svg)?);
    let html = html.map(|place| (place, page(&runs)));
    let svg = svg.map(|place| (place, picture(&runs)));
    for (place, text) in html.into_iter().chain(svg) {
        place.write(&text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_name_the_page_is_next_to_the_first_report() {
        let args = |html: Option<&str>, svg: Option<&str>| ReportArgs {
            files: vec!["/tmp/a.json".into(), "b".into()],
            html: html.map(PathBuf::from),
            svg: svg.map(PathBuf::from),
            force: false,
        };
        let of = |html, svg| outputs(&args(html, svg));
        assert_eq!(of(None, None), (Some("/tmp/a.html".into()), None));
        assert_eq!(of(None, Some("x.svg")), (None, Some("x.svg".into())));
        assert_eq!(of(Some("-"), Some("y")), (Some("-".into()), Some("y".into())));
    }
}
