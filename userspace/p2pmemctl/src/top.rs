// SPDX-License-Identifier: MIT OR Apache-2.0

//! `top`: shows providers, their use and its rates, and the owners of buffers, until the user quits.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context as _};
use p2pmem::{human_size, short_size, Device, Holder, Info, PciAddr, Provider, Stats};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table};
use ratatui::Frame;

use crate::cli::TopArgs;
use crate::list::NO_PROVIDERS;
use crate::{Context, Outcome};

/// Width of the bar that shows the used part of a provider.
const BAR: u64 = 20;

/// State of the module at one moment.
struct Sample {
    /// Time of the sample, on an arbitrary clock.
    at: Duration,
    info: Info,
    providers: Vec<(Provider, Stats)>,
    /// Owners of buffers; `None` without the privilege to read them.
    holders: Option<Vec<(PciAddr, Holder)>>,
}

impl Sample {
    fn take(device: &Device, at: Duration) -> p2pmem::Result<Self> {
        Ok(Self {
            at,
            info: device.info()?,
            providers: device.provider_stats()?,
            holders: device.holders(),
        })
    }
}

/// The current sample and the one before.
struct Samples {
    before: Option<Sample>,
    now: Sample,
}

/// Formats a rate per second, with one decimal if it is small.
fn rate(count: f64) -> String {
    if count == 0.0 || count >= 10.0 {
        format!("{count:.0}")
    } else {
        format!("{count:.1}")
    }
}

impl Samples {
    /// Returns the rate of a provider's counter per second; `None` if the previous sample has no such provider.
    fn per_second(&self, id: u32, now: u64, counter: fn(&Stats) -> u64) -> Option<f64> {
        let before = self.before.as_ref()?;
        let (_, stats) = before.providers.iter().find(|(provider, _)| provider.id == id)?;
        let seconds = self.now.at.saturating_sub(before.at).as_secs_f64();
        (seconds > 0.0).then(|| now.saturating_sub(counter(stats)) as f64 / seconds)
    }

    fn provider(&self, provider: &Provider, stats: &Stats) -> Row<'static> {
        let used = provider.size.saturating_sub(provider.free);
        let count = |counter: fn(&Stats) -> u64| {
            let rate_now = self.per_second(provider.id, counter(stats), counter);
            number(rate_now.map_or_else(|| "-".to_owned(), rate))
        };
        let bytes = self.per_second(provider.id, stats.alloc_bytes, |s| s.alloc_bytes);
        Row::new([
            number(provider.id.to_string()),
            Cell::from(provider.addr.to_string()),
            Cell::from(provider.state.to_string()),
            Cell::from(bar(used, provider.size)),
            number(short_size(used)),
            number(short_size(provider.size)),
            number(provider.buffers.to_string()),
            number(provider.exports.to_string()),
            count(|s| s.allocs),
            number(bytes.map_or_else(|| "-".to_owned(), |bytes| short_size(bytes as u64))),
            count(|s| s.frees),
            count(|s| s.failed),
        ])
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let rows = u16::try_from(self.now.providers.len()).unwrap_or(u16::MAX);
        let [title, providers, _, holders, keys] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Max(rows.saturating_add(1).max(2)),
            Constraint::Length(1),
            Constraint::Min(2),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(self.title(), title);
        if self.now.providers.is_empty() {
            frame.render_widget(Paragraph::new(NO_PROVIDERS), providers);
        } else {
            frame.render_widget(self.providers(), providers);
        }
        match &self.now.holders {
            None => frame.render_widget(Paragraph::new("Run as root to see the owners of buffers."), holders),
            Some(all) if all.is_empty() => frame.render_widget(Paragraph::new("No process holds a buffer."), holders),
            Some(all) => frame.render_widget(holder_table(all), holders),
        }
        frame.render_widget(Paragraph::new("q: quit"), keys);
    }

    fn title(&self) -> Paragraph<'static> {
        let info = &self.now.info;
        let used = info.size.saturating_sub(info.free);
        Paragraph::new(format!(
            "p2pmem {}: {} providers, {} of {} used, {} buffers",
            info.version,
            info.providers,
            human_size(used),
            human_size(info.size),
            info.buffers
        ))
    }

    fn providers(&self) -> Table<'static> {
        let rows = self
            .now
            .providers
            .iter()
            .map(|(provider, stats)| self.provider(provider, stats));
        let widths = [3, 12, 8, BAR as u16 + 2, 9, 9, 7, 7, 8, 9, 7, 9].map(Constraint::Length);
        Table::new(rows, widths).header(header([
            (true, "ID"),
            (false, "DEVICE"),
            (false, "STATE"),
            (false, ""),
            (true, "USED"),
            (true, "SIZE"),
            (true, "BUFFERS"),
            (true, "DMABUFS"),
            (true, "ALLOCS/s"),
            (true, "BYTES/s"),
            (true, "FREES/s"),
            (true, "REFUSED/s"),
        ]))
    }
}

fn number(text: impl Into<String>) -> Cell<'static> {
    Cell::from(Text::from(text.into()).alignment(Alignment::Right))
}

fn header<const N: usize>(names: [(bool, &'static str); N]) -> Row<'static> {
    let cells = names.map(|(is_number, name)| {
        if is_number {
            number(name)
        } else {
            Cell::from(Line::from(name))
        }
    });
    Row::new(cells).style(Style::new().add_modifier(Modifier::BOLD))
}

/// Returns a bar for the used part of `size`. A part that is not zero has at least one character.
fn bar(used: u64, size: u64) -> String {
    let filled = used.saturating_mul(BAR).div_ceil(size.max(1)).min(BAR) as usize;
    format!("[{}{}]", "|".repeat(filled), " ".repeat(BAR as usize - filled))
}

fn holder_table(all: &[(PciAddr, Holder)]) -> Table<'static> {
    let rows: Vec<_> = all
        .iter()
        .map(|(addr, holder)| {
            Row::new([
                Cell::from(holder.owner.clone()),
                Cell::from(addr.to_string()),
                number(holder.buffers.to_string()),
                number(short_size(holder.size)),
            ])
        })
        .collect();
    let widths = [28, 12, 8, 9].map(Constraint::Length);
    Table::new(rows, widths).header(header([
        (false, "HOLDER"),
        (false, "DEVICE"),
        (true, "BUFFERS"),
        (true, "SIZE"),
    ]))
}

/// Returns whether a key quits the program.
fn quits(key: &KeyEvent) -> bool {
    let ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

/// Waits until the next sample is due. Returns false if the user quits; redraws on other events.
fn wait(until: Instant, redraw: &mut dyn FnMut() -> std::io::Result<()>) -> std::io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if !event::poll(left)? {
            return Ok(true);
        }
        match event::read()? {
            Event::Key(key) if quits(&key) => return Ok(false),
            Event::Resize(..) => redraw()?,
            _ => {}
        }
    }
}

pub(crate) fn top(context: &mut Context<'_>, args: &TopArgs) -> anyhow::Result<Outcome> {
    let device = context.open()?;
    ensure!(
        !context.json && std::io::stdout().is_terminal(),
        "top needs a terminal: use `p2pmemctl stats --json` in programs"
    );
    let began = Instant::now();
    // Take the first sample before switching to the alternate screen, so that an error remains visible.
    let mut samples = Samples {
        before: None,
        now: Sample::take(&device, began.elapsed())?,
    };
    let mut terminal = ratatui::try_init().context("cannot set up the terminal")?;
    let mut shown = 0;
    let result = loop {
        if let Err(error) = terminal.draw(|frame| samples.draw(frame)) {
            break Err(error.into());
        }
        shown += 1;
        if args.count.is_some_and(|count| shown >= count) {
            break Ok(());
        }
        let mut redraw = || terminal.draw(|frame| samples.draw(frame)).map(drop);
        match wait(Instant::now() + args.interval, &mut redraw) {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(error) => break Err(anyhow::Error::from(error)),
        }
        match Sample::take(&device, began.elapsed()) {
            Ok(now) => samples.before = Some(std::mem::replace(&mut samples.now, now)),
            Err(error) => break Err(error.into()),
        }
    };
    ratatui::try_restore().context("cannot restore the terminal")?;
    result.map(|()| Outcome::Done)
}

#[cfg(test)]
mod tests {
    use p2pmem::fake::Fake;
    use p2pmem::Request;
    use ratatui::backend::TestBackend;
    use ratatui::Terminal;

    use super::*;

    /// Returns the lines of the screen without trailing blanks.
    fn screen(samples: &Samples, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| samples.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        (0..height)
            .map(|y| {
                let line: String = (0..width).map(|x| buffer[(x, y)].symbol()).collect();
                line.trim_end().to_owned()
            })
            .collect()
    }

    fn words(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn use_rates_and_owners_are_shown() {
        let fake = Fake::example();
        fake.holders(Some(
            "id function size bar_offset mappings exports state owner\n\
             1 0000:03:00.0 67108864 0x0 1 0 live pid 812 (trainer)\n\
             2 0000:03:00.0 67108864 0x4000000 1 0 live pid 812 (trainer)\n\
             3 0000:08:00.0 4096 0x0 0 1 live pid 9 (ib_write_bw)\n",
        ));
        let device = fake.device();
        let before = Sample::take(&device, Duration::from_secs(10)).unwrap();
        let keep: Vec<_> = (0..2)
            .map(|_| device.alloc(&Request::new(64 << 20).provider(1)).unwrap())
            .collect();
        drop(device.alloc(&Request::new(4096).provider(2)).unwrap());
        let now = Sample::take(&device, Duration::from_secs(12)).unwrap();
        let samples = Samples {
            before: Some(before),
            now,
        };
        let lines = screen(&samples, 132, 16);
        assert!(
            lines[0].contains("3 providers, 128 MiB of 352 MiB used, 2 buffers"),
            "{lines:#?}"
        );
        assert_eq!(words(&lines[2])[..3], ["ID", "DEVICE", "STATE"]);
        // Half of the provider, in two seconds by two allocations.
        let half = format!("[{}{}]", "|".repeat(10), " ".repeat(10));
        assert!(lines[3].contains(&half), "{lines:#?}");
        let (_, numbers) = lines[3].split_once(']').unwrap();
        assert_eq!(words(numbers), ["128M", "256M", "2", "0", "1.0", "64M", "0", "0"]);
        assert!(
            lines[4].contains("0000:08:00.0") && lines[5].contains("0000:05:00.0"),
            "{lines:#?}"
        );
        let (_, numbers) = lines[4].split_once(']').unwrap();
        assert_eq!(words(numbers)[1..], ["64M", "0", "0", "0.5", "2K", "0.5", "0"]);
        assert_eq!(words(&lines[7]), ["HOLDER", "DEVICE", "BUFFERS", "SIZE"]);
        assert_eq!(
            words(&lines[8]),
            ["pid", "812", "(trainer)", "0000:03:00.0", "2", "128M"]
        );
        assert_eq!(
            words(&lines[9]),
            ["pid", "9", "(ib_write_bw)", "0000:08:00.0", "1", "4K"]
        );
        assert_eq!(lines[15], "q: quit");
        drop(keep);
    }

    #[test]
    fn the_first_sample_has_no_rates() {
        let fake = Fake::example();
        let now = Sample::take(&fake.device(), Duration::ZERO).unwrap();
        let lines = screen(&Samples { before: None, now }, 132, 14);
        let (_, numbers) = lines[3].split_once(']').unwrap();
        assert_eq!(words(numbers)[4..], ["-", "-", "-", "-"], "{lines:#?}");
        // The fake device does not report owners, like the kernel for unprivileged users.
        assert!(lines.iter().any(|line| line.contains("Run as root")), "{lines:#?}");
    }

    #[test]
    fn an_empty_list_and_a_small_screen_are_drawn() {
        let fake = Fake::new();
        fake.holders(Some("id function size bar_offset mappings exports state owner\n"));
        let now = Sample::take(&fake.device(), Duration::ZERO).unwrap();
        let samples = Samples { before: None, now };
        let lines = screen(&samples, 80, 10);
        assert!(
            lines.iter().any(|line| line.contains("p2pmemctl publish")),
            "{lines:#?}"
        );
        assert!(
            lines.iter().any(|line| line.contains("No process holds a buffer")),
            "{lines:#?}"
        );
        for (width, height) in [(1, 1), (10, 3), (200, 2), (3, 60)] {
            assert_eq!(screen(&samples, width, height).len(), usize::from(height));
        }
    }

    #[test]
    fn bars_have_the_right_length() {
        for (used, size, filled) in [
            (0, 100, 0),
            (1, 1 << 40, 1),
            (50, 100, 10),
            (100, 100, 20),
            (0, 0, 0),
            (u64::MAX, 1, 20),
        ] {
            assert_eq!(bar(used, size).matches('|').count(), filled, "{used} of {size}");
            assert_eq!(bar(used, size).len() as u64, BAR + 2);
        }
    }

    #[test]
    fn quit_keys() {
        let key = |code, modifiers| quits(&KeyEvent::new(code, modifiers));
        assert!(key(KeyCode::Char('q'), KeyModifiers::NONE) && key(KeyCode::Esc, KeyModifiers::NONE));
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL) && !key(KeyCode::Char('c'), KeyModifiers::NONE));
    }
}
