// SPDX-License-Identifier: MIT OR Apache-2.0

//! The accelerator as a process: serves one emulator after another on a vfio-user socket.
//!
//! Prints `ready` and the socket's path once it listens. Ends on SIGTERM or SIGINT, or with `--once` when its client does.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use p2pmem_devices::accel::{Accel, Control, Settings};
use p2pmem_devices::size::parse_size;
use p2pmem_vfio_user::{LinkSpeed, Listener, serve};
use tracing::{error, info};

/// How long a client may take to be served to its end after a signal.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Emulated accelerator: a PCI device with memory behind a BAR, compute operations and a DMA engine.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Unix socket to listen on for the emulator
    #[arg(long)]
    socket: PathBuf,
    /// Size of the memory behind BAR2: a power of two
    #[arg(long, default_value = "256M", value_parser = parse_size)]
    memory: u64,
    /// Unix socket that answers questions about counters and state
    #[arg(long)]
    control: Option<PathBuf>,
    /// File to write the counters to, as JSON, whenever a client has gone and at the end
    #[arg(long)]
    counters: Option<PathBuf>,
    /// PCIe generation of the link
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=5))]
    link_gen: u8,
    /// Lanes of the link: 1, 2, 4, 8, 12, 16 or 32
    #[arg(long, default_value_t = 16)]
    link_width: u8,
    /// Device serial number
    #[arg(long, default_value_t = 0)]
    serial: u64,
    /// End when the first client has gone
    #[arg(long)]
    once: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let speed = match args.link_gen {
        1 => LinkSpeed::Gen1,
        2 => LinkSpeed::Gen2,
        3 => LinkSpeed::Gen3,
        4 => LinkSpeed::Gen4,
        _ => LinkSpeed::Gen5,
    };
    let settings = Settings {
        memory: args.memory,
        speed,
        lanes: args.link_width,
        serial: args.serial,
    };
    let mut accel = Accel::new(settings).context("cannot make the accelerator")?;
    let shared = accel.shared();
    let control = Control::new(accel.shared());
    if let Some(path) = &args.control {
        control
            .clone()
            .listen(path)
            .with_context(|| format!("cannot listen on {}", path.display()))?;
    }
    let listener =
        Listener::bind(&args.socket).with_context(|| format!("cannot listen on {}", args.socket.display()))?;
    let ending = Arc::new(Ending::default());
    end_on_signals(
        Arc::clone(&ending),
        args.counters.clone(),
        sockets(&args),
        control.clone(),
    )?;
    println!("ready {}", listener.path().display());
    std::io::stdout().flush()?;
    loop {
        let stream = listener.accept().context("cannot accept a client")?;
        info!("client connected");
        ending.serving(stream.try_clone().context("cannot watch the client")?);
        shared.set_connected(true);
        let result = serve(stream, &mut accel);
        shared.set_connected(false);
        if let Err(error) = result {
            error!(%error, "connection lost");
        }
        save_counters(args.counters.as_deref(), &control);
        if ending.served() || args.once {
            remove(&sockets(&args));
            return Ok(());
        }
    }
}

fn sockets(args: &Args) -> Vec<PathBuf> {
    std::iter::once(&args.socket).chain(&args.control).cloned().collect()
}

fn remove(sockets: &[PathBuf]) {
    for socket in sockets {
        // Gone already is as good.
        let _ = std::fs::remove_file(socket);
    }
}

/// Lets a signal end the client's connection first: an emulator in the middle of an access survives that, but not a
/// socket closed with its request unread.
#[derive(Debug, Default)]
struct Ending {
    state: Mutex<(bool, Option<UnixStream>)>,
}

impl Ending {
    fn lock(&self) -> MutexGuard<'_, (bool, Option<UnixStream>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client is about to be served.
    fn serving(&self, stream: UnixStream) {
        let mut state = self.lock();
        if state.0 {
            let _ = stream.shutdown(Shutdown::Both);
        }
        state.1 = Some(stream);
    }

    /// The client has gone. Returns whether the process was told to end.
    fn served(&self) -> bool {
        let mut state = self.lock();
        state.1 = None;
        state.0
    }

    /// The process shall end. Returns whether a client is being served, whose end will be that of the process.
    fn begin(&self) -> bool {
        let mut state = self.lock();
        state.0 = true;
        state
            .1
            .as_ref()
            .is_some_and(|stream| stream.shutdown(Shutdown::Both).is_ok())
    }
}

/// Ends the process in good order when it is told to.
fn end_on_signals(
    ending: Arc<Ending>,
    counters: Option<PathBuf>,
    sockets: Vec<PathBuf>,
    control: Control,
) -> Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])
        .context("cannot watch for signals")?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.forever().next().is_none() {
            return;
        }
        if ending.begin() {
            // The serving thread ends the process; this is for the case that it cannot.
            std::thread::sleep(END_TIMEOUT);
            error!("the client was not served to an end within {} s", END_TIMEOUT.as_secs());
        }
        save_counters(counters.as_deref(), &control);
        remove(&sockets);
        std::process::exit(0);
    })?;
    Ok(())
}

/// Writes the counters beside the file and moves them into place, so that nobody reads half of them.
fn save_counters(path: Option<&Path>, control: &Control) {
    let Some(path) = path else { return };
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let text = format!("{:#}\n", control.counters());
    if let Err(error) = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, path)) {
        error!(%error, path = %path.display(), "cannot write the counters");
    }
}
