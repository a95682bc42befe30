// SPDX-License-Identifier: MIT OR Apache-2.0

//! Options of `stream`.

use std::time::Duration;

use clap::Args;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::value::{seconds, size};

use crate::cli::{OwnArgs, PORT};
use crate::wire::PeerMemory;

use super::protocol::{check_chunk, StreamRequest};

/// Chunk that is tried first without `--chunk`.
const DEFAULT_CHUNK: u64 = 64 << 20;
/// Duration without `--duration` and `--frames`.
const DEFAULT_DURATION: Duration = Duration::from_secs(10);

/// Options of `stream`.
#[derive(Debug, Clone, Args)]
pub struct StreamArgs {
    /// The server.
    pub host: String,

    /// Options of this side.
    #[command(flatten)]
    pub own: OwnArgs,

    /// TCP port of the server.
    #[arg(long, default_value_t = PORT)]
    pub port: u16,

    /// Kind of memory for the frames on the server [default: the server's own --memory]
    #[arg(long, value_enum, value_name = "MEMORY")]
    pub peer_memory: Option<MemoryKind>,

    /// The provider of the server's memory, by id or PCI address [default: the provider nearest to the server's NIC]
    #[arg(long, value_name = "DEVICE", requires = "peer_memory")]
    pub peer_device: Option<String>,

    /// Bytes of a frame with its header of 64 bytes, a multiple of 128 [default: 64M, or the largest half, quarter, and so
    /// on of which both sides have memory for two]
    #[arg(long, value_name = "SIZE", value_parser = chunk)]
    pub chunk: Option<u64>,

    /// Memory for frames on each side: at least two frames, at most 64.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "128M")]
    pub buffer: u64,

    /// End after this time [default: 10 seconds, if --frames is not given]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<Duration>,

    /// End after this number of frames.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub frames: Option<u64>,

    /// Bytes per second that the source produces; it drops frames that find no free memory [default: as many as the
    /// server takes]
    #[arg(long, value_name = "SIZE", value_parser = rate)]
    pub rate: Option<u64>,

    /// The server checks order, checksum, and content of each frame.
    #[arg(long)]
    pub verify: bool,

    /// Seed of the samples.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl StreamArgs {
    /// Returns the request to the server.
    pub fn request(&self) -> StreamRequest {
        StreamRequest {
            chunk: self.chunk.unwrap_or(DEFAULT_CHUNK),
            fixed: self.chunk.is_some(),
            buffer: self.buffer,
            verify: self.verify,
            peer: self.peer_memory.map(|kind| PeerMemory {
                kind: kind.name().to_owned(),
                device: self.peer_device.clone(),
            }),
        }
    }

    /// Returns the time after which the stream ends; `None` if only the number of frames ends it.
    pub fn end_after(&self) -> Option<Duration> {
        let default = self.frames.is_none().then_some(DEFAULT_DURATION);
        self.duration.or(default)
    }
}

fn chunk(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    check_chunk(bytes).map(|()| bytes)
}

fn rate(text: &str) -> Result<u64, String> {
    match size(text)? {
        0 => Err("specify at least 1 byte per second, or omit --rate for a source without a rate".into()),
        rate => Ok(rate),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn parse(line: &str) -> Result<StreamArgs, String> {
        match Cli::try_parse_from(line.split(' ')) {
            Ok(cli) => match cli.command {
                Command::Stream(args) => Ok(args),
                other => panic!("{other:?}"),
            },
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn the_default_is_64_mib_or_less_for_10_seconds() {
        let args = parse("p2pmem-perf stream host").unwrap();
        let request = args.request();
        assert_eq!((request.chunk, request.fixed, request.verify), (64 << 20, false, false));
        assert_eq!(args.end_after(), Some(Duration::from_secs(10)));
        let args = parse("p2pmem-perf stream host --frames 3 --chunk 1M").unwrap();
        assert_eq!((args.end_after(), args.request().fixed), (None, true));
        let args = parse("p2pmem-perf stream host --frames 3 --duration 2").unwrap();
        assert_eq!(args.end_after(), Some(Duration::from_secs(2)));
    }

    #[test]
    fn impossible_values_are_refused() {
        for (option, words) in [
            ("--chunk 0", "4 KiB to 1 GiB"),
            ("--chunk 4097", "multiple of 128"),
            ("--chunk 2G", "4 KiB to 1 GiB"),
            ("--rate 0", "at least 1 byte per second"),
            ("--frames 0", "0 is not in"),
            ("--duration 0", "from 0.001"),
            ("--peer-device 3", "--peer-memory"),
        ] {
            let error = parse(&format!("p2pmem-perf stream host {option}")).unwrap_err();
            assert!(error.contains(words), "{option}: {error}");
        }
    }
}
