// SPDX-License-Identifier: MIT OR Apache-2.0

//! The program `p2pmem-async-pingpong`: two nodes send messages to each other by byte code that the CPU interprets. It
//! verifies every byte.

mod exchange;
pub mod options;
pub mod wire;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use options::{Deadline, Options};
use p2pmem::rdma::Nic;

/// Send messages between two nodes by byte code, and verify every byte.
#[derive(Debug, Parser)]
#[command(name = "p2pmem-async-pingpong", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Wait for the other node, and answer its messages.
    Serve(Options),
    /// Connect to the node that serves, and send messages.
    Run {
        /// Host name or address of the other node.
        host: String,
        #[command(flatten)]
        options: Options,
    },
}

/// Runs the program.
pub fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("p2pmem-async-pingpong: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Serve(options) => {
            let deadline = options.deadline();
            let nic = Nic::open(&options.nic)?;
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, options.port));
            let listener = listener.with_context(|| format!("listening on port {}", options.port))?;
            let stream = accept(&listener, deadline)?;
            print(&exchange::serve(&options, &nic, stream, deadline)?)
        }
        Command::Run { host, options } => {
            let deadline = options.deadline();
            let nic = Nic::open(&options.nic)?;
            let stream = connect(&host, options.port, deadline)?;
            print(&exchange::run(&options, &nic, stream, deadline)?)
        }
    }
}

fn print(summary: &exchange::Summary) -> Result<()> {
    println!("{}", serde_json::to_string(summary)?);
    Ok(())
}

/// Accepts a connection.
///
/// # Errors
///
/// The deadline passed.
pub fn accept(listener: &TcpListener, deadline: Deadline) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                deadline.left().context("waiting for the other node")?;
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error).context("accepting a connection"),
        }
    }
}

/// Connects to a node that serves.
///
/// # Errors
///
/// The name is unknown, or the deadline passed.
pub fn connect(host: &str, port: u16, deadline: Deadline) -> Result<TcpStream> {
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .context("the other node's name")?
        .collect();
    loop {
        for address in &addresses {
            if let Ok(stream) = TcpStream::connect_timeout(address, deadline.left()?) {
                return Ok(stream);
            }
        }
        deadline
            .left()
            .with_context(|| format!("no `p2pmem-async-pingpong serve` answers on {host}:{port}"))?;
        std::thread::sleep(Duration::from_millis(100));
    }
}
