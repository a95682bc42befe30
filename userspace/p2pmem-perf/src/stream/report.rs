// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of a stream.

use std::io::{self, Write};

use p2pmem::human_size;
use serde::Serialize;

use crate::wire::Side;

use super::protocol::{StreamRequest, Verified};

/// The report.
#[derive(Debug, Clone, Serialize)]
pub struct StreamReport {
    /// Parameters of the stream. `chunk` is the requested size.
    pub request: StreamRequest,
    /// Name of the source.
    pub source: &'static str,
    /// Bytes per second that the source was requested to produce; `None` for as many as the server takes.
    pub source_rate: Option<u64>,
    /// The client's NIC and memory.
    pub client: Side,
    /// The server's NIC and memory.
    pub server: Side,
    /// Bytes of a frame.
    pub chunk: u64,
    /// Slots for frames in the client's memory.
    pub client_slots: u32,
    /// Slots for frames in the server's memory.
    pub server_slots: u32,
    /// Seconds from the start of the source until the server had handled the last frame.
    pub seconds: f64,
    /// Frames sent.
    pub frames: u64,
    /// Bytes sent.
    pub bytes: u64,
    /// Average rate.
    pub average_mib_per_s: f64,
    /// Lowest rolling average.
    pub rolling_min_mib_per_s: f64,
    /// Highest rolling average.
    pub rolling_max_mib_per_s: f64,
    /// Frames that the source has produced. Those above `frames` were not sent when the stream ended.
    pub produced: u64,
    /// Frames that the source dropped, because there was no free memory.
    pub dropped: u64,
    /// Frames that were sent and did not arrive.
    pub lost: u64,
    /// Frames whose checksum is wrong; `None` without a verification.
    pub crc_errors: Option<u64>,
    /// What the verification found; `None` without one.
    pub verified: Option<Verified>,
    /// Microseconds of processor time of the client for a frame, without those of the source's threads.
    pub cpu_us_client: f64,
    /// Microseconds of processor time of the server for a frame.
    pub cpu_us_server: f64,
}

/// Returns the frames that were sent and did not arrive: those that no completion reported, and those that are missing
/// between others, although the source has not dropped them.
pub fn lost(sent: u64, sent_gaps: u64, arrived: u64, verified: Option<&Verified>) -> u64 {
    let missing = verified.map_or(0, |verified| verified.missing.saturating_sub(sent_gaps));
    sent.saturating_sub(arrived).max(missing)
}

impl StreamReport {
    /// Returns whether all frames arrived and no wrong one was found.
    pub fn is_correct(&self) -> bool {
        self.lost == 0 && self.verified.as_ref().is_none_or(|verified| verified.wrong() == 0)
    }

    /// Writes the lines of the report.
    ///
    /// # Errors
    ///
    /// The errors of `out`.
    pub fn lines(&self, out: &mut dyn Write) -> io::Result<()> {
        let memory = |side: &Side| {
            let memory = match side.providers.as_slice() {
                [] => "host memory".to_owned(),
                list => format!("{} memory ({})", side.memory, list.join(", ")),
            };
            format!(
                "{memory} by {}, registered by {}",
                side.nics.join("+"),
                side.registration
            )
        };
        writeln!(
            out,
            " stream of {} samples, frames of {}, RDMA WRITE with immediate data, client to server",
            self.source,
            human_size(self.chunk)
        )?;
        writeln!(out, " client: {}, {} slots", memory(&self.client), self.client_slots)?;
        writeln!(out, " server: {}, {} slots", memory(&self.server), self.server_slots)?;
        writeln!(
            out,
            " {} {}, {} in {:.2} s: {:.2} MiB/s, rolling average {:.2} to {:.2} MiB/s",
            self.frames,
            if self.frames == 1 { "frame" } else { "frames" },
            human_size(self.bytes),
            self.seconds,
            self.average_mib_per_s,
            self.rolling_min_mib_per_s,
            self.rolling_max_mib_per_s
        )?;
        writeln!(
            out,
            " {} lost, {} dropped by the source; processor time for a frame: client {:.2} us, server {:.2} us",
            self.lost, self.dropped, self.cpu_us_client, self.cpu_us_server
        )?;
        match &self.verified {
            None => Ok(()),
            Some(verified) if verified.wrong() == 0 => writeln!(out, " verified: every frame is correct"),
            Some(verified) => writeln!(
                out,
                " verified: {} frames without a valid header, {} with a wrong checksum, {} with wrong samples, {} out of order",
                verified.bad_headers, verified.crc_errors, verified.wrong_samples, verified.out_of_order
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_frames_are_not_lost() {
        assert_eq!(lost(10, 0, 10, None), 0);
        assert_eq!(lost(10, 0, 9, None), 1);
        let missing = |missing| Verified {
            missing,
            ..Verified::default()
        };
        // The source has dropped 3 frames between others.
        assert_eq!(lost(10, 3, 10, Some(&missing(3))), 0);
        assert_eq!(lost(10, 3, 10, Some(&missing(4))), 1);
        // Dropped frames before the first one or after the last one are in no gap.
        assert_eq!(lost(10, 3, 10, Some(&missing(0))), 0);
    }
}
