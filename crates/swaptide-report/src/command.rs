//! The command line: what is read, where the pictures go.
//!
//! Invariants
//! 1. Nothing is written before everything was read and drawn.
//! 2. Nothing that exists is replaced or written to without `--force`, but pipes, terminals,
//!    `/dev/null` and descriptors of this process; and no report at all.
//! 3. The two pictures go to two places, however these are named.

use std::fs::File;
use std::fs::Metadata;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use clap::Args;
use swaptide_host::report::sink::{Sink, is_own_descriptor};
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
        }
        // A link that leads nowhere would be replaced, too.
        let is_kept = !args.force && !is_own_descriptor(path);
        if is_kept && std::fs::symlink_metadata(path).is_ok() {
            let found = std::fs::metadata(path);
            if !found.is_ok_and(|found| found.is_dir() || is_stream(&found)) {
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

/// True for a pipe, a terminal, and `/dev/null`: writing there replaces nothing. Devices are known
/// by their numbers, because to open one may already change something.
fn is_stream(found: &Metadata) -> bool {
    let (major, minor) = ((found.rdev() >> 8) & 0xfff, found.rdev() & 0xff);
    let is_terminal = matches!(major, 4 | 5 | 136..=143);
    let kind = found.file_type();
    kind.is_fifo() || kind.is_char_device() && (is_terminal || (major, minor) == (1, 3))
}

/// True if both name one place.
fn is_same_place(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        let path = std::path::absolute(path).ok()?;
        Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?))
    };
    let stdout = Path::new("/dev/stdout");
    let [one, other] = [one, other].map(|path| if path == Path::new("-") { stdout } else { path });
    let found = |path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let is_same = |one: Option<_>, other| one.is_some() && one == other;
    one == other
        || place(one).is_some_and(|one| Some(one) == place(other))
        || is_same(found(one), found(other))
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
        && is_same_place(html, svg)
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

    /// A directory of one test, removed when it ends.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let place = format!("swaptide-report-{name}-{}", std::process::id());
            let place = std::env::temp_dir().join(place);
            std::fs::create_dir_all(&place).expect("a directory");
            Place(place)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_exists_is_left_without_force() {
        let place = Place::new("exists");
        let file = place.path("file");
        std::fs::write(&file, "kept").expect("write");
        let link = |name: &str, to: &Path| {
            std::os::unix::fs::symlink(to, place.path(name)).expect("link");
        };
        link("to-file", &file);
        link("to-nothing", &place.path("new"));
        link("to-null", Path::new("/dev/null"));
        let _socket = std::os::unix::net::UnixListener::bind(place.path("socket")).expect("bind");
        let open = |path: &Path, force| {
            let args = ReportArgs { files: Vec::new(), html: None, svg: None, force };
            OutputPlace::open(path, &args)
        };
        for name in ["file", "to-file", "to-nothing", "socket"] {
            let refused = open(&place.path(name), false);
            assert!(matches!(refused, Err(DrawError::Exists(_))), "{name}");
        }
        assert!(matches!(open(Path::new("/dev/zero"), false), Err(DrawError::Exists(_))));
        assert!(matches!(open(&place.0, false), Err(DrawError::Write(..))));
        for path in [place.path("to-null"), place.path("free"), "/dev/null".into()] {
            assert!(open(&path, false).is_ok(), "{}", path.display());
        }
        assert!(open(&file, true).is_ok() && open(&place.path("to-nothing"), true).is_ok());
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "kept");
        assert!(!place.path("new").exists() && !place.path("free").exists());
    }

    #[test]
    fn pipes_and_terminals_are_written_to() {
        let place = Place::new("pipe");
        let (_reader, writer) = io::pipe().expect("a pipe");
        let pipe = File::from(std::os::fd::OwnedFd::from(writer));
        assert!(is_stream(&pipe.metadata().expect("metadata")));
        assert!(is_stream(&std::fs::metadata("/dev/tty").expect("/dev/tty")));
        assert!(!is_stream(&std::fs::metadata("/dev/full").expect("/dev/full")));
        assert!(!is_stream(&std::fs::metadata(&place.0).expect("a directory")));
    }

    #[test]
    fn one_place_by_two_names_is_refused() {
        let place = Place::new("same");
        std::fs::create_dir(place.path("in")).expect("a directory");
        std::os::unix::fs::symlink(&place.0, place.path("in/up")).expect("link");
        let same = |one: &str, other: &str| is_same_place(&place.path(one), &place.path(other));
        assert!(same("x", "x") && same("x", "./x"));
        assert!(same("x", "in/../x") && same("in/up/x", "x") && same("in/up/in/y", "in/y"));
        assert!(!same("x", "y") && !same("x", "in/x"));
        std::fs::write(place.path("x"), "").expect("write");
        std::os::unix::fs::symlink(place.path("x"), place.path("link")).expect("link");
        assert!(same("x", "link") && !same("x", "in"));
        assert!(is_same_place(Path::new("-"), Path::new("-")));
        assert!(is_same_place(Path::new("-"), Path::new("/dev/stdout")));
        assert!(!is_same_place(Path::new("-"), &place.path("x")));
    }
}
