// SPDX-License-Identifier: MIT OR Apache-2.0

//! The places of boxes and texts: a tree from left to right.
//!
//! A box of a bridge is as high as everything below it, so that the functions below one switch are beside one box. Devices
//! are in one column at the right. A band behind each switch connects the switch with its devices.

use super::tree::{Node, Role};

/// Height of a line of text.
const LINE: u32 = 16;
/// Size of the font in boxes and notes.
const FONT: u32 = 12;
/// Size of the font of the title.
const TITLE_FONT: u32 = 18;
/// Space between a box and its text.
const PADDING: u32 = 8;
/// Height of the bar that shows used memory, with the space above.
const USAGE: u32 = 12;
/// Space between boxes, one above the other.
const GAP: u32 = 18;
/// Space between columns.
const COLUMN_GAP: u32 = 28;
/// Space around the drawing.
const MARGIN: u32 = 20;
/// Space between a band and the boxes in it.
const BAND: u32 = 5;
/// The least width of the drawing, for the notes.
const MIN_WIDTH: u32 = 720;
/// The most characters of a line in a box.
const MAX_CHARS: usize = 46;
/// Width of the mark of a client at the left of its box.
pub(super) const CLIENT_MARK: u32 = 6;

/// A rectangle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rect {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// The look of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    Title,
    Name,
    Plain,
    Warning,
}

/// A text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Text {
    pub(super) x: u32,
    /// The base line.
    pub(super) y: u32,
    pub(super) look: Look,
    pub(super) content: String,
}

impl Text {
    /// Returns the size of the font.
    pub(super) fn font(&self) -> u32 {
        match self.look {
            Look::Title => TITLE_FONT,
            _ => FONT,
        }
    }

    /// Returns the area of the text.
    #[cfg(test)]
    pub(super) fn area(&self) -> Rect {
        let font = self.font();
        Rect {
            x: self.x,
            y: self.y - font,
            width: width_of(&self.content, font),
            height: font + font / 4,
        }
    }
}

/// A box with text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextBox {
    pub(super) rect: Rect,
    pub(super) role: Role,
    pub(super) is_client: bool,
    pub(super) has_warning: bool,
    pub(super) texts: Vec<Text>,
    /// The bar of used memory, and the width of its used part.
    pub(super) usage: Option<(Rect, u32)>,
}

/// A horizontal line between two boxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) y: u32,
}

/// A drawing.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub(super) width: u32,
    pub(super) height: u32,
    /// Areas behind switches and their devices. A band of a switch below another one comes after the other band.
    pub(super) bands: Vec<Rect>,
    pub(super) links: Vec<Link>,
    pub(super) boxes: Vec<TextBox>,
    /// Texts that are in no box.
    pub(super) texts: Vec<Text>,
}

/// Returns the width of a text in a font with characters of one width, rounded up.
fn width_of(text: &str, font: u32) -> u32 {
    // Fonts differ: the characters of DejaVu Sans Mono have 0.602 of the font's size, those of others less. Characters
    // beyond ASCII can have the width of two.
    let columns: u32 = text.chars().map(|c| if c.is_ascii() { 1 } else { 2 }).sum();
    (columns * font * 62).div_ceil(100)
}

/// Returns a line of a box: shortened, without characters that XML or a line cannot have.
fn line(text: &str) -> String {
    let clean = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut short: String = text.chars().map(clean).take(MAX_CHARS).collect();
    if text.chars().count() > MAX_CHARS {
        short.pop();
        short.push('…');
    }
    short
}

/// Returns the lines of a node with their looks.
fn lines(node: &Node) -> Vec<(Look, String)> {
    let own = node.lines.iter().enumerate();
    let mut all: Vec<_> = own
        .map(|(n, text)| (if n == 0 { Look::Name } else { Look::Plain }, line(text)))
        .collect();
    all.extend(node.warning.map(|warning| (Look::Warning, line(warning))));
    all
}

/// Returns the height of a box without regard to what is below the node.
fn own_height(node: &Node) -> u32 {
    let lines = u32::try_from(lines(node).len()).unwrap_or(u32::MAX);
    let usage = if node.usage.is_some() { USAGE } else { 0 };
    lines * LINE + 2 * PADDING + usage
}

/// Returns the height of a node with all below it.
fn height(node: &Node) -> u32 {
    own_height(node).max(stack(&node.children))
}

/// Returns the height of nodes, one below the other.
fn stack(nodes: &[Node]) -> u32 {
    let gaps = u32::try_from(nodes.len().saturating_sub(1)).unwrap_or(0) * GAP;
    nodes.iter().map(height).sum::<u32>() + gaps
}

fn box_width(node: &Node) -> u32 {
    let widest = lines(node)
        .iter()
        .map(|(_, text)| width_of(text, FONT))
        .max()
        .unwrap_or(0);
    widest + 2 * PADDING + CLIENT_MARK
}

fn is_device(role: Role) -> bool {
    matches!(role, Role::Provider | Role::Memory | Role::Client)
}

/// The widths of the columns: one for each level of bridges, and the last one for devices.
#[derive(Default)]
struct Columns {
    bridges: Vec<u32>,
    devices: u32,
}

impl Columns {
    fn measure(&mut self, nodes: &[Node], level: usize) {
        for node in nodes {
            let width = box_width(node);
            if is_device(node.role) {
                self.devices = self.devices.max(width);
                continue;
            }
            if self.bridges.len() <= level {
                self.bridges.resize(level + 1, 0);
            }
            self.bridges[level] = self.bridges[level].max(width);
            self.measure(&node.children, level + 1);
        }
    }

    /// Returns the left edge of a column of bridges.
    fn bridge_x(&self, level: usize) -> u32 {
        let before = self.bridges.iter().take(level);
        MARGIN + before.map(|width| width + COLUMN_GAP).sum::<u32>()
    }

    /// Returns the left edge of the column of devices.
    fn device_x(&self) -> u32 {
        self.bridge_x(self.bridges.len())
    }

    fn right(&self) -> u32 {
        self.device_x() + self.devices
    }
}

/// Lays a tree out, with notes above and a legend below.
pub(super) fn layout(roots: &[Node], notes: &[String]) -> Layout {
    let mut columns = Columns::default();
    columns.measure(roots, 0);
    let mut layout = Layout {
        width: (columns.right() + MARGIN).max(MIN_WIDTH),
        ..Layout::default()
    };
    let mut y = MARGIN + TITLE_FONT;
    layout.text(MARGIN, y, Look::Title, "PCI topology".into());
    y += 8;
    let chars = (layout.width - 2 * MARGIN) * 100 / (FONT * 62);
    for note in notes {
        for wrapped in wrap(&line_of_any_length(note), chars as usize) {
            y += LINE;
            layout.text(MARGIN, y, Look::Plain, wrapped);
        }
    }
    y += 2 * GAP;
    if roots.is_empty() {
        y += LINE;
        let none = "This machine has no device with memory to share, and no client.";
        layout.text(MARGIN, y, Look::Plain, none.into());
        y += GAP;
    }
    for root in roots {
        layout.place(root, &columns, 0, y);
        y += height(root) + 2 * GAP;
    }
    layout.legend(y);
    layout
}

/// Returns a text without characters that XML or a line cannot have.
fn line_of_any_length(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Divides a text at blanks into lines of at most `chars` characters. A longer word has a line of its own, shortened.
fn wrap(text: &str, chars: usize) -> Vec<String> {
    let mut all = vec![String::new()];
    for word in text.split_whitespace() {
        let word: String = word.chars().take(chars).collect();
        let used = all.last().map_or(0, |line| line.chars().count());
        if used > 0 && used + 1 + word.chars().count() > chars {
            all.push(String::new());
        }
        if let Some(line) = all.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(&word);
        }
    }
    all
}

impl Layout {
    fn text(&mut self, x: u32, y: u32, look: Look, content: String) {
        self.texts.push(Text { x, y, look, content });
    }

    /// Places a node and all below it. Returns the box of the node.
    fn place(&mut self, node: &Node, columns: &Columns, level: usize, top: u32) -> Rect {
        let height = height(node);
        let (x, width) = if is_device(node.role) {
            (columns.device_x(), columns.devices)
        } else {
            (columns.bridge_x(level), columns.bridges[level])
        };
        let rect = Rect {
            x,
            y: top,
            width,
            height,
        };
        if node.role == Role::Switch {
            self.bands.push(Rect {
                x: x - BAND,
                y: top - BAND,
                width: columns.right() - x + 2 * BAND,
                height: height + 2 * BAND,
            });
        }
        self.boxes.push(text_box(node, rect));
        // What is below is in the middle of a box that is higher.
        let mut y = top + (height - stack(&node.children)) / 2;
        for child in &node.children {
            let place = self.place(child, columns, level + 1, y);
            self.links.push(Link {
                from: x + width,
                to: place.x,
                y: place.y + place.height / 2,
            });
            y += place.height + GAP;
        }
        rect
    }

    /// Places the legend below `top`, and sets the height of the drawing.
    fn legend(&mut self, top: u32) {
        const ENTRIES: [(Role, &str); 5] = [
            (
                Role::Provider,
                "provider: p2pmem hands its memory out; the bar shows the used part",
            ),
            (
                Role::Memory,
                "memory that is not a provider's, with the interface that can hand it out",
            ),
            (
                Role::Client,
                "client: uses memory of other devices by DMA (mark at the left edge)",
            ),
            (
                Role::Switch,
                "PCIe switch: traffic between devices in its area stays in the switch",
            ),
            (
                Role::Port,
                "switch port that redirects traffic to the root complex by ACS",
            ),
        ];
        const SAMPLE: u32 = 28;
        let mut y = top;
        self.text(MARGIN, y + FONT, Look::Name, "Legend".into());
        y += LINE + 4;
        for (role, about) in ENTRIES {
            let rect = Rect {
                x: MARGIN,
                y,
                width: SAMPLE,
                height: LINE - 2,
            };
            self.boxes.push(TextBox {
                rect,
                role,
                is_client: role == Role::Client,
                has_warning: role == Role::Port,
                texts: Vec::new(),
                usage: None,
            });
            self.text(MARGIN + SAMPLE + PADDING, y + FONT - 1, Look::Plain, about.into());
            y += LINE + 4;
        }
        self.height = y + MARGIN;
    }
}

fn text_box(node: &Node, rect: Rect) -> TextBox {
    let lines = lines(node);
    let left = rect.x + PADDING + CLIENT_MARK;
    // A high box has its text in the middle.
    let first = rect.y + (rect.height - own_height(node)) / 2 + PADDING;
    let texts = lines.into_iter().zip(1..).map(|((look, content), n)| Text {
        x: left,
        y: first + n * LINE - 4,
        look,
        content,
    });
    let texts: Vec<_> = texts.collect();
    let usage = node.usage.map(|(used, size)| {
        let bar = Rect {
            x: left,
            y: rect.y + rect.height - PADDING - USAGE + 4,
            width: rect.width - 2 * PADDING - CLIENT_MARK,
            height: USAGE - 4,
        };
        let filled = u128::from(bar.width) * u128::from(used.min(size));
        let filled = filled.checked_div(u128::from(size)).unwrap_or(0);
        (bar, u32::try_from(filled).unwrap_or(bar.width))
    });
    TextBox {
        rect,
        role: node.role,
        is_client: node.is_client,
        has_warning: node.warning.is_some(),
        texts,
        usage,
    }
}
