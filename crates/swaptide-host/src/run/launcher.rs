//! The launcher: the process that the user started. See [`supervise`](crate::run::supervise).
//!
//! Owns its end of the connection to the supervisor, and its signals. Locks: none.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use swaptide_sys::sock::poll_readable;

use crate::run::channel::{Channel, LauncherMessage, PassOn};
use crate::run::descriptors::release_streams;
use crate::run::error::RunError;
use crate::signals::{self, ChildStatus, Signals};

/// The process that the user started.
pub(super) struct Launcher<'a> {
    pub(super) supervisor: u32,
    pub(super) channel: Channel,
    pub(super) signals: Signals,
    pub(super) program: Option<u32>,
    /// No program was started: running processes were attached to.
    pub(super) is_attached: bool,
    /// The command that waits until the processes are under the budget, with `--background`.
    pub(super) waiting: &'a mut Option<Channel>,
}

impl Launcher<'_> {
    pub(super) fn run(mut self) -> Result<u8, RunError> {
        loop {
            let ready = poll_readable(&[self.signals.as_fd(), self.channel.stream.as_fd()], None)
                .unwrap_or(0);
            if ready & 1 != 0 {
                self.pass_on();
            }
            if ready & 2 == 0 {
                continue;
            }
            let Some(messages) = self.channel.receive() else { return self.wait_alone() };
            for message in messages {
                match message {
                    LauncherMessage::Started(pid) => self.program = Some(pid),
                    LauncherMessage::Failed(message) => return Err(RunError::Start(message)),
                    LauncherMessage::Said(line) => report_line(&line),
                    LauncherMessage::Attached(line) => self.note_attached(line),
                    // As the program is stopped, so is this process: the shell takes the
                    // terminal back.
                    LauncherMessage::Stopped => signals::send(std::process::id(), libc::SIGSTOP),
                    LauncherMessage::Ended { status, lines, stays } => {
                        lines.iter().for_each(|line| report_line(line));
                        if !stays {
                            self.wait_for_back();
                        }
                        return Ok(status);
                    }
                }
            }
        }
    }

    fn pass_on(&mut self) {
        while let Some(arrived) = self.signals.next() {
            match arrived.sender {
                Some(sender) if arrived.signal != libc::SIGCHLD && sender != self.supervisor => {
                    self.channel.send(&PassOn { signal: arrived.signal, sender });
                }
                _ => {}
            }
        }
    }

    /// The first process has the agent: a command that waits for that ends, and hears no more.
    fn note_attached(&mut self, line: Option<String>) {
        let own = std::process::id();
        let how = match self.waiting {
            Some(_) => format!("swaptide ctl detach {own}"),
            None => "Ctrl-C".to_owned(),
        };
        line.iter().for_each(|line| report_line(&format!("{line}; {how} lets them go")));
        let Some(mut command) = self.waiting.take() else { return };
        if poll_readable(&[command.stream.as_fd()], Some(Duration::ZERO)).unwrap_or(0) != 0 {
            // It was ended meanwhile, and knows of nothing.
            self.channel.send(&PassOn { signal: libc::SIGINT, sender: own });
        }
        command.send(&LauncherMessage::Attached(None));
        release_streams(&[], &[2]);
    }

    /// Nothing is left in the background: a process that waited for this run sees none of it any
    /// more.
    fn wait_for_back(&self) {
        while !matches!(signals::child_change(), ChildStatus::NoChild | ChildStatus::Ended { .. }) {
            let _ = poll_readable(&[self.signals.as_fd()], Some(Duration::from_millis(5)));
            while self.signals.next().is_some() {}
        }
    }

    /// The supervisor was killed. The program is this process's child now and keeps the limits it
    /// has.
    fn wait_alone(mut self) -> Result<u8, RunError> {
        if self.is_attached {
            report_line(
                "the supervisor was killed: the processes keep their limits, their forks fail, and \
                there is no report",
            );
            return Ok(1);
        }
        let Some(program) = self.program else {
            return Err(RunError::Start("the supervisor was killed".into()));
        };
        report_line("the supervisor was killed: limits stay as they are, there is no report");
        loop {
            match signals::child_change() {
                ChildStatus::Ended { pid, status } if pid == program => return Ok(status),
                ChildStatus::NoChild => {
                    return Err(RunError::Start(
                        "the supervisor was killed, and the program with it".into(),
                    ));
                }
                ChildStatus::Nothing => {
                    let _ = poll_readable(&[self.signals.as_fd()], None);
                    while let Some(arrived) = self.signals.next() {
                        if arrived.sender.is_some() && arrived.signal != libc::SIGCHLD {
                            signals::send(program, arrived.signal);
                        }
                    }
                }
                _ => {}
            }
            self.program = Some(program);
        }
    }
}

/// One line on standard error; a failed write is ignored.
fn report_line(line: &str) {
    let _ = writeln!(io::stderr(), "swaptide: {line}");
}
