//! `swaptide completions` and `swaptide man`: what shells and `man` know of the command line.
//!
//! Both come from the grammar that parses it, without the hidden commands. Owns what only the
//! manual says: exit statuses, files, environment variables. Packages install what these two
//! commands write.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Command, ValueEnum};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};

use crate::{refuse, terminal};

/// Arguments of `swaptide completions`.
#[derive(Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum, value_name = "SHELL")]
    shell: KnownShell,
}

/// Arguments of `swaptide man`.
#[derive(Args)]
pub(crate) struct ManArgs {
    /// Directory for the pages, one for each command; it is made if it is missing
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum KnownShell {
    /// For /usr/share/bash-completion/completions/swaptide, or `source <(...)`
    Bash,
    /// For a file _swaptide in a directory of $fpath
    Zsh,
    /// For ~/.config/fish/completions/swaptide.fish
    Fish,
}

impl KnownShell {
    fn generator(self) -> Shell {
        match self {
            KnownShell::Bash => Shell::Bash,
            KnownShell::Zsh => Shell::Zsh,
            KnownShell::Fish => Shell::Fish,
        }
    }
}

/// Prints the completions of one shell.
pub(crate) fn completions(args: &CompletionsArgs, grammar: &Command) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(args.shell.generator(), &mut visible(grammar), "swaptide", &mut text);
    terminal::print(&String::from_utf8_lossy(&text));
    ExitCode::SUCCESS
}

/// Writes the pages.
pub(crate) fn pages(args: &ManArgs, grammar: &Command) -> ExitCode {
    match write_pages(&args.dir, grammar) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => refuse("man", &message),
    }
}

/// The grammar without its hidden commands, which the generators would show. A command cannot be
/// taken away from it, so it is made again from the others.
fn visible(grammar: &Command) -> Command {
    Command::new("swaptide")
        .version(env!("CARGO_PKG_VERSION"))
        .about(grammar.get_about().cloned().unwrap_or_default())
        .subcommand_required(true)
        .args(grammar.get_arguments().cloned())
        .subcommands(grammar.get_subcommands().filter(|command| !command.is_hide_set()).cloned())
}

fn write_pages(dir: &Path, grammar: &Command) -> Result<(), String> {
    let failed = |path: &Path, error: io::Error| {
        format!("--dir {}: {error}; name a directory that can be written", path.display())
    };
    std::fs::create_dir_all(dir).map_err(|error| failed(dir, error))?;
    let mut grammar = visible(grammar).disable_help_subcommand(true);
    grammar.build();
    let mut waiting = vec![grammar];
    while let Some(command) = waiting.pop() {
        waiting.extend(command.get_subcommands().cloned());
        let page = Man::new(marked(&command))
            .manual("Swap in user space")
            .source(concat!("swaptide ", env!("CARGO_PKG_VERSION")))
            .date(" ");
        let path = dir.join(page.get_filename());
        let text = render(&page, &command).map_err(|error| failed(&path, error))?;
        std::fs::write(&path, text).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

/// A page: what the generator makes of a command, and what is known besides.
fn render(page: &Man, command: &Command) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    // Long words of options leave gaps where both edges are to be straight.
    text.extend_from_slice(b".ad l\n");
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut text)?;
    }
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let mut rest = Roff::new();
    if name == "swaptide" {
        section(&mut rest, "EXIT STATUS", &STATUSES);
        section(&mut rest, "FILES", &FILES);
        section(&mut rest, "ENVIRONMENT", &ENVIRONMENT);
    } else {
        let known = STATUSES_OF.iter().find(|(of, _)| *of == name);
        section(&mut rest, "EXIT STATUS", known.map_or(&USUAL_STATUSES[..], |(_, them)| them));
    }
    if name == "swaptide-top" {
        section(&mut rest, "KEYS", &crate::top::KEYS);
    }
    rest.control("SH", ["SEE ALSO"]);
    if name == "swaptide" {
        rest.text([roman("The pages of the commands above; ")]);
        rest.text([italic("/usr/share/doc/swaptide"), roman(".")]);
    } else {
        rest.text([bold("swaptide"), roman("(1): files, environment variables, all commands")]);
    }
    rest.to_writer(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.replace(LINE_END, "\n.br\n").replace(MAY_BREAK, "\\:").into_bytes())
}

/// Stands for the end of a line within a text of the grammar, of which the generator makes a space.
const LINE_END: &str = "\u{e000}";
/// Stands for a place where a long word may be divided, which the generator cannot be told.
const MAY_BREAK: &str = "\u{e001}";

/// The command with these marks in the texts of its options.
fn marked(command: &Command) -> Command {
    command.clone().mut_args(|option| match option.get_help().map(ToString::to_string) {
        Some(text) => {
            option.help(text.replace('\n', LINE_END).replace("][", &format!("]{MAY_BREAK}[")))
        }
        None => option,
    })
}

fn section(page: &mut Roff, title: &str, entries: &[(&str, &str)]) {
    page.control("SH", [title]);
    for (term, meaning) in entries {
        page.control("TP", []);
        page.text([bold(*term)]);
        page.text([roman(*meaning)]);
    }
}

const USUAL_STATUSES: [(&str, &str); 2] =
    [("0", "Done."), ("2", "Bad input, or nothing to ask: one line says why; nothing changed.")];

const BENCH_STATUSES: [(&str, &str); 4] = [
    ("0", "Measured."),
    ("1", "A run failed, or a file could not be written."),
    ("2", "Bad input, or a peer that cannot be set up here; nothing was measured."),
    ("128+N", "Ended by the signal N (130 for Ctrl-C), after the machine was put back."),
];

/// What `run` and `attach` end with besides the usual.
const RUN_STATUSES: [(&str, &str); 5] = [
    ("the program's", "What the program ended with; 128+N when the signal N ended it."),
    ("0", "attach: all processes have ended, or were let go."),
    ("2", "Bad input, or the program cannot be started: one line says why; nothing was started."),
    ("124", "--on-stall kill ended a run that made almost no progress."),
    ("137", "--strict ended a run past its budget, or SIGKILL the program."),
];

/// Commands with more to say than the usual.
const STATUSES_OF: [(&str, &[(&str, &str)]); 9] = [
    ("swaptide-run", &RUN_STATUSES),
    ("swaptide-attach", &RUN_STATUSES),
    ("swaptide-bench", &BENCH_STATUSES),
    ("swaptide-lab", &BENCH_STATUSES),
    (
        "swaptide-doctor",
        &[("0", "All that is required is there."), ("1", "Something required is missing.")],
    ),
    (
        "swaptide-ctl-reclaim",
        &[
            ("0", "As much went out as was asked for."),
            ("1", "Less went out."),
            ("2", "Bad input, or no run to ask: one line says why."),
        ],
    ),
    (
        "swaptide-ctl-ready",
        &[
            ("0", "The daemon takes runs; with --live: it answers."),
            ("1", "It is drained, and takes none."),
            ("2", "Bad input, or no daemon answers: one line says why."),
        ],
    ),
    (
        "swaptide-ctl-drain",
        &[
            ("0", "None is left, or --cancel: it takes runs again."),
            ("1", "Some are left, or could not be detached; the daemon stays drained."),
            ("2", "Bad input, or no daemon answers: one line says why."),
        ],
    ),
    (
        "swaptide-oci-runtime",
        &[
            ("the runtime's", "What the other runtime ended with."),
            ("2", "Bad input, or it cannot be started: one line says why."),
        ],
    ),
];

const STATUSES: [(&str, &str); 6] = [
    ("0", "Done. run: the program ended with 0."),
    (
        "1",
        "doctor: something is missing. bench, lab: a run failed. ctl reclaim: less went out. ctl \
        ready: drained. ctl drain: some are left.",
    ),
    ("2", "Bad input, or what keeps a command from starting: one line on standard error."),
    ("124", "run: killed by --on-stall kill."),
    ("137", "run: killed by --strict, or by SIGKILL."),
    (
        "others",
        "run: the program's own; 128+N when the signal N ended it. oci-runtime: the other \
        runtime's.",
    ),
];

const FILES: [(&str, &str); 6] = [
    (
        "libswaptide_agent.so",
        "The preloaded library: next to the command, or in ../lib/swaptide from there.",
    ),
    ("/etc/swaptide.toml", "The configuration of the daemon's service; the unit names it."),
    ("/run/swaptide", "Control sockets of root's runs, PID.sock, and of the daemon, daemon.sock."),
    (
        "$XDG_RUNTIME_DIR/swaptide",
        "Those of other users; /tmp/swaptide-UID if the variable is not set.",
    ),
    (
        "/var/tmp",
        "Where a swap file is made if none is named and $TMPDIR is not set. It has no name: it is \
        gone when the run ends, however it ends.",
    ),
    ("/var/tmp/swaptide-real", "What the programs of bench real need; kept between calls."),
];

const ENVIRONMENT: [(&str, &str); 9] = [
    ("NO_COLOR", "Not empty: no colors, unless --color always."),
    ("SWAPTIDE_AGENT", "Path of the preloaded library."),
    ("SWAPTIDE_AGENT_LOG", "A file to which the agents append one line for each unusual thing."),
    ("SWAPTIDE_DIRECTORY", "Directory of the control sockets."),
    ("SWAPTIDE_NO_DAEMON", "Not empty: run joins no daemon, as with --no-daemon."),
    ("SWAPTIDE_SOCKET", "Set by run, for the programs of the run."),
    ("SSL_CERT_FILE", "Authorities for NBD servers with TLS, instead of this machine's."),
    ("TMPDIR", "Directory for swap files that are not named."),
    ("XDG_RUNTIME_DIR", "Parent of the directory of the control sockets, for users but root."),
];

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn each_command_has_a_page_and_hidden_ones_have_none() {
        let dir = std::env::temp_dir().join(format!("swaptide-man-{}", std::process::id()));
        write_pages(&dir, &crate::Cli::command()).expect("pages");
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).expect(name);
        let overview = read("swaptide.1");
        let sections = ["EXIT STATUS", "FILES", "ENVIRONMENT", "SUBCOMMANDS"];
        for part in sections.into_iter().chain(["124", "/run/swaptide", "NO_COLOR"]) {
            assert!(overview.contains(part), "{part} is not in\n{overview}");
        }
        for command in crate::Cli::command().get_subcommands() {
            let name = format!("swaptide-{}.1", command.get_name());
            assert_eq!(dir.join(&name).exists(), !command.is_hide_set(), "{name}");
            assert_eq!(overview.contains(&name.replace('-', "\\-")[..name.len() - 1]), {
                !command.is_hide_set()
            });
        }
        assert!(read("swaptide-ctl-reclaim.1").contains("Less went out"));
        assert!(read("swaptide-ctl-drain.1").contains("Some are left"));
        assert!(read("swaptide-oci-runtime.1").contains("What the other runtime ended with"));
        assert!(read("swaptide-run.1").contains("\\-\\-on\\-stall"));
        std::fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn the_statuses_are_of_commands_that_exist() {
        let mut grammar = visible(&crate::Cli::command());
        grammar.build();
        let mut names = Vec::new();
        let mut waiting = vec![&grammar];
        while let Some(command) = waiting.pop() {
            waiting.extend(command.get_subcommands());
            names.extend(command.get_display_name());
        }
        for (name, _) in STATUSES_OF {
            assert!(names.contains(&name), "{name} in {names:?}");
        }
    }
}
