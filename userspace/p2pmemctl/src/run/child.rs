// SPDX-License-Identifier: MIT OR Apache-2.0

//! The child process of `run`: forwards signals and returns the exit status.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{pidfd_open, pidfd_send_signal, Pid, PidfdFlags, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

/// The signals that end programs, or that programs define.
const FORWARDED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// Returns whether this process ignores a signal, for example because nohup started it. The child then ignores the signal
/// too, unless this process handles it.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| (mask >> (signal - 1)) & 1 == 1)
}

/// Runs a command, forwards signals to it, and waits for its end.
pub(super) fn run(command: &mut Command) -> io::Result<ExitStatus> {
    let signals = FORWARDED.into_iter().filter(|signal| !is_ignored(*signal));
    // The handlers are installed before the command starts, so that no signal ends this process alone.
    let (read, write) = UnixStream::pair()?;
    let mut signals = SignalDelivery::with_pipe(read, write, WithOrigin::default(), signals)?;
    let mut child = command.spawn()?;
    // By its descriptor, a signal never reaches another process that has the same number later.
    let ended = match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(error) => {
            child.kill()?;
            child.wait()?;
            return Err(error.into());
        }
    };
    loop {
        let arrived = signals.get_read().as_fd();
        let mut ready = [ended.as_fd(), arrived].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !ready[0].revents().is_empty() {
            return child.wait();
        }
        for origin in signals.pending() {
            // Signals of the terminal come from the kernel, and reach the child too: it is in the same process group.
            let sent = matches!(origin.cause, Cause::Sent(_));
            if let (true, Some(signal)) = (sent, Signal::from_named_raw(origin.signal)) {
                // Fails only if the child has ended, which the next poll() reports.
                let _ = pidfd_send_signal(&ended, signal);
            }
        }
    }
}

/// Returns the exit code of a shell for this status: that of the child, or 128 and the number of the signal.
pub(super) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| Some(128 + status.signal()?));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> ExitStatus {
        run(Command::new("/bin/sh").args(["-c", script])).unwrap()
    }

    // One test, because a signal to this process goes to the children of all its threads.
    #[test]
    fn the_child_gets_signals_and_decides_the_exit_code() {
        assert_eq!(exit_code(shell("exit 0")), 0);
        assert_eq!(exit_code(shell("exit 77")), 77);
        assert_eq!(exit_code(shell("kill -KILL $$")), 137);
        assert_eq!(exit_code(shell("kill -TERM $$")), 143);
        // The child waits for a signal that this process gets. If nohup started the tests, all ignore SIGHUP.
        for (signal, code) in [("HUP", 129), ("INT", 130), ("TERM", 143), ("USR1", 138)] {
            if is_ignored(i32::from(code) - 128) {
                continue;
            }
            let waiting = format!("kill -{signal} $PPID; exec sleep 60");
            assert_eq!(exit_code(shell(&waiting)), code, "{signal}");
        }
        let handled = shell("trap 'kill $!; exit 9' USR2; sleep 60 & kill -USR2 $PPID; wait");
        assert_eq!(exit_code(handled), 9);
    }

    #[test]
    fn ignored_signals_are_known() {
        assert!(is_ignored(signal_hook::consts::SIGPIPE), "Rust programs ignore SIGPIPE");
        assert!(!is_ignored(signal_hook::consts::SIGWINCH));
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let error = run(&mut Command::new("/nonexistent/program")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
